"""docs/your_strategy.md followed word for word: its package is installed, runs and is reported."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import HOMES
from bench.common.environment import REPOSITORY
from tests.support.records import read_lines

pytestmark = pytest.mark.ranks
walked = pytest.mark.slow
"""What follows the page with a sweep of its own: `.ci/run` asks for it by name."""

PAGE = (REPOSITORY / "docs" / "your_strategy.md").read_text()
FILE = re.compile(r"^`(gather_twice/[\w./]+)`.+?```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
MISTAKE = re.compile(r"^\| `(\w+\.py)` \| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", re.MULTILINE)
FROM_BENCH = re.compile(r"^from bench import (\(.+?\)|.+?$)", re.MULTILINE | re.DOTALL)
SWEEP = re.search(r"^python (run_sweep\.py .*strategy=gather_twice.*)$", PAGE, re.MULTILINE)[1]
PYTEST = re.search(r"^pytest (-k gather_twice)$", PAGE, re.MULTILINE)[1]
QUICK = ("measure.steps=2", "measure.warmup_steps=1", "measure.repeats=1", "sweep_dir=out",
         "measure.reference_budget_s=0")  # fmt: skip
COLOR = re.search(r'PlotStyle\("(#\w{6})"', PAGE)[1]
FILES = dict(FILE.findall(PAGE))
MISTAKES = {f"gather_twice_{number}": mistake for number, mistake in enumerate(MISTAKE.findall(PAGE))}


def write_package(folder, name, files):
    """The page's package, under another name where a test needs several of it."""
    for path, text in files.items():
        file = folder / path.replace("gather_twice", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("gather_twice", name).replace("gather-twice", name.replace("_", "-")))
    (folder / name / name / "__init__.py").touch()
    return folder / name


def with_mistake(mistake):
    """The page's files with one line wrong, as the page suggests."""
    file, wrong, right, _ = mistake
    path = f"gather_twice/gather_twice/{file}"
    assert FILES[path].count(right) == 1
    return {**FILES, path: FILES[path].replace(right, wrong)}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A process environment in which the page's package is installed."""
    return with_installed(tmp_path_factory, {"gather_twice": FILES})


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """The same with one package more for each mistake."""
    wrong = {name: with_mistake(mistake) for name, mistake in MISTAKES.items()}
    return with_installed(tmp_path_factory, {"gather_twice": FILES} | wrong)


def with_installed(tmp_path_factory, files_of):
    sources, site = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    packages = [write_package(sources, name, files) for name, files in files_of.items()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", site, *packages], check=True)
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{site}"}


@pytest.fixture(scope="module")
def swept(mistaken, tmp_path_factory):
    """The folder of the page's sweep, in which the mistaken strategies run, too; records by strategy."""
    folder = tmp_path_factory.mktemp("sweep")
    words = shlex.split(SWEEP.replace("strategy=", f"strategy={','.join(MISTAKES)},"))
    command = [sys.executable, REPOSITORY / words[0], *words[1:], *QUICK]
    done = subprocess.run(command, cwd=folder, env=mistaken, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr  # as cells failed
    records = read_lines(folder / "out" / "records.jsonl")
    return folder / "out", {record["config"]["strategy"]: record for record in records}


def test_the_page_holds_a_whole_package_and_some_mistakes():
    assert {Path(path).name for path in FILES} == {"pyproject.toml", "facts.py", "attention.py"}
    assert {file for file, *_ in MISTAKES.values()} == {"facts.py", "attention.py"}


def test_every_path_that_the_page_and_contributing_name_is_there():
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:bench|analysis|tests|docs|conf)/[\w./]+)`", PAGE + contributing))
    assert len(named) > 30
    assert not [path for path in named if "gather_twice" not in path and not (REPOSITORY / path).exists()]
    assert len(contributing.splitlines()) <= 160


@walked
def test_the_pages_strategy_is_measured_and_reported_beside_ours_with_its_package(swept):
    record, ours = (swept[1][name] for name in ("gather_twice", "ulysses"))
    assert record["status"] == ours["status"] == "ok", record["reason"]
    assert record["losses"]["tokens_digest"] == ours["losses"]["tokens_digest"]
    assert record["engagement"]["calls"]["attention all_gather"] == 2
    assert record["engagement"]["calls"]["attention reduce_scatter"] == 2
    assert record["environment"]["strategy_package"] == "gather-twice"
    assert record["environment"]["packages"]["gather-twice"] == "0.1.0"
    assert "strategy_package" not in ours["environment"]
    assert "gather-twice" not in ours["environment"]["packages"]
    for name in ("summary.csv", "summary.md", "report.html", "figures/throughput.svg"):
        assert "gather_twice" in (swept[0] / name).read_text()
    assert COLOR.lower() in (swept[0] / "figures" / "throughput.svg").read_text()
    assert "package gather-twice" in (swept[0] / "report.html").read_text()


@walked
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_of_the_page_is_a_wrong_result_in_the_pages_words(swept, name):
    record = swept[1][name]
    assert record["status"] == "wrong_result"
    assert MISTAKES[name][-1] in record["reason"].replace(name, "gather_twice")
    assert record["timing"] is None


@walked
def test_the_pages_pytest_command_passes_and_runs_the_tests_of_strategies(environment):
    done = pytest_in(REPOSITORY, environment, "-v", *shlex.split(PYTEST))
    assert done.returncode == 0, done.stdout
    passed = {line.partition("::")[0] for line in done.stdout.splitlines() if " PASSED" in line}
    files = ("strategies/test_strategies", "run/cell/test_gates", "training/test_training_equivalence")
    assert passed >= {f"tests/bench/{file}.py" for file in files}


def pytest_in(folder, environment, *words):
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@walked
def test_the_pages_strategy_moves_into_this_repository_by_what_the_page_says(tmp_path):
    copy, name = tmp_path / "copy", "gather_twice"
    hidden = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=hidden)
    for left_out in ("results", ".ci"):
        (copy / left_out).symlink_to(REPOSITORY / left_out)
    strategies = copy / "bench" / "strategies"
    (strategies / name).mkdir()
    (strategies / name / "__init__.py").touch()
    for file in ("facts.py", "attention.py"):
        text = FROM_BENCH.sub(from_homes, FILES[f"{name}/{name}/{file}"])
        (strategies / name / file).write_text(text)
    table = strategies / "__init__.py"
    imported = f"from bench.strategies.{name}.facts import GatherTwiceFacts\nfrom bench.strategies.local"
    text = table.read_text().replace("from bench.strategies.local", imported)
    table.write_text(text.replace("GatherKVFacts(),", "GatherKVFacts(),\n        GatherTwiceFacts(),"))
    (copy / "conf" / "strategy" / f"{name}.yaml").write_text(f"# Two gathers\nname: {name}\n")
    files = (
        "test_architecture",
        "test_docs",
        "test_doc_formulas",
        "bench/request/test_help",
        "analysis/show/figures/test_figures",
    )
    words = ("-m", "not ranks", "-k", "not three_examples", *(f"tests/{file}.py" for file in files))
    done = pytest_in(copy, os.environ | {"PYTHONPATH": str(copy)}, *words)
    assert done.returncode == 0, done.stdout


def from_homes(found):
    """The same names from where they are defined."""
    return "\n".join(f"from {HOMES[name]} import {name}" for name in re.findall(r"\w+", found[1]))
