"""The package of docs/your_strategy.md is installed, runs and is reported as the page says."""

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
walkthrough = pytest.mark.slow
"""Mark of tests that run the page's sweep; `.ci/run` selects them by file."""

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
    """Write the page's package under a name, as a test may need several packages; return its folder."""
    for path, text in files.items():
        file = folder / path.replace("gather_twice", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("gather_twice", name).replace("gather-twice", name.replace("_", "-")))
    (folder / name / name / "__init__.py").touch()
    return folder / name


def with_mistake(mistake):
    """Return the page's files with one of the page's mistakes."""
    file, wrong, right, _ = mistake
    path = f"gather_twice/gather_twice/{file}"
    assert FILES[path].count(right) == 1
    return {**FILES, path: FILES[path].replace(right, wrong)}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A process environment in which the page's package is installed."""
    return install_packages(tmp_path_factory, {"gather_twice": FILES})


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """A process environment with the page's package and one more package for every mistake."""
    wrong = {name: with_mistake(mistake) for name, mistake in MISTAKES.items()}
    return install_packages(tmp_path_factory, {"gather_twice": FILES} | wrong)


def install_packages(tmp_path_factory, files_of):
    """Install packages, given their files by name, and return a process environment that finds them."""
    sources, site = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    packages = [write_package(sources, name, files) for name, files in files_of.items()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", site, *packages], check=True)
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{site}"}


@pytest.fixture(scope="module")
def swept(mistaken, tmp_path_factory):
    """The folder of the page's sweep with the mistaken strategies added, and the records by strategy."""
    folder = tmp_path_factory.mktemp("sweep")
    words = shlex.split(SWEEP.replace("strategy=", f"strategy={','.join(MISTAKES)},"))
    command = [sys.executable, REPOSITORY / words[0], *words[1:], *QUICK]
    done = subprocess.run(command, cwd=folder, env=mistaken, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr  # because cells failed
    records = read_lines(folder / "out" / "records.jsonl")
    return folder / "out", {record["config"]["strategy"]: record for record in records}


def test_page_has_all_files_of_the_package_and_mistakes():
    assert {Path(path).name for path in FILES} == {"pyproject.toml", "facts.py", "attention.py"}
    assert {file for file, *_ in MISTAKES.values()} == {"facts.py", "attention.py"}


def test_paths_in_the_page_and_in_contributing_exist():
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:bench|analysis|tests|docs|conf)/[\w./]+)`", PAGE + contributing))
    assert len(paths) > 30
    assert not [path for path in paths if "gather_twice" not in path and not (REPOSITORY / path).exists()]
    assert len(contributing.splitlines()) <= 160


@walkthrough
def test_page_strategy_is_measured_and_reported_with_its_package(swept):
    record, ulysses = (swept[1][name] for name in ("gather_twice", "ulysses"))
    assert record["status"] == ulysses["status"] == "ok", record["reason"]
    assert record["losses"]["tokens_digest"] == ulysses["losses"]["tokens_digest"]
    assert record["engagement"]["calls"]["attention all_gather"] == 2
    assert record["engagement"]["calls"]["attention reduce_scatter"] == 2
    assert record["environment"]["strategy_package"] == "gather-twice"
    assert record["environment"]["packages"]["gather-twice"] == "0.1.0"
    assert "strategy_package" not in ulysses["environment"]
    assert "gather-twice" not in ulysses["environment"]["packages"]
    for name in ("summary.csv", "summary.md", "report.html", "figures/throughput.svg"):
        assert "gather_twice" in (swept[0] / name).read_text()
    assert COLOR.lower() in (swept[0] / "figures" / "throughput.svg").read_text()
    assert "package gather-twice" in (swept[0] / "report.html").read_text()


@walkthrough
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_of_the_page_is_a_wrong_result_with_its_message(swept, name):
    record = swept[1][name]
    assert record["status"] == "wrong_result"
    assert MISTAKES[name][-1] in record["reason"].replace(name, "gather_twice")
    assert record["timing"] is None


@walkthrough
def test_page_pytest_command_runs_the_tests_of_strategies(environment):
    done = pytest_in(REPOSITORY, environment, "-v", *shlex.split(PYTEST))
    assert done.returncode == 0, done.stdout
    passed = {line.partition("::")[0] for line in done.stdout.splitlines() if " PASSED" in line}
    files = ("strategies/test_strategies", "run/cell/test_gates", "training/test_training_equivalence")
    assert passed >= {f"tests/bench/{file}.py" for file in files}


def pytest_in(folder, environment, *words):
    """Run pytest in a folder and return the completed process."""
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@walkthrough
def test_page_strategy_moves_into_this_repository(tmp_path):
    copy, name = tmp_path / "copy", "gather_twice"
    hidden = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=hidden)
    for linked in ("results", ".ci"):
        (copy / linked).symlink_to(REPOSITORY / linked)
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


def from_homes(match):
    """Return an import from `bench` as imports from the modules that define the names."""
    return "\n".join(f"from {HOMES[name]} import {name}" for name in re.findall(r"\w+", match[1]))
