"""CONTRIBUTING.md followed word for word: its package is installed, runs, is checked, and is reported."""

import csv
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import HOMES
from bench.environment import REPOSITORY
from bench.store import read_records
from bench.strategies import STRATEGIES
from bench.strategies.table import StrategyTable
from tests.attention_cases import WORLD_SIZES, beyond_their_limits, check_cases, cover, errors_of
from tests.installed import see_what_is_installed_now

pytestmark = pytest.mark.ranks
walked = pytest.mark.slow
"""What follows the page with a sweep of its own: `.ci/run` asks for it by name."""

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()
FILE = re.compile(r"^`(gather_twice/[\w./]+)`.+?```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
MISTAKE = re.compile(r"^\| `(\w+\.py)` \| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", re.MULTILINE)
SWEEP = re.search(r"^python (run_sweep\.py .*strategy=gather_twice.*)$", PAGE, re.MULTILINE)[1]
PYTEST = re.search(r"^pytest (-k gather_twice)$", PAGE, re.MULTILINE)[1]
QUICK = ("measure.steps=2", "measure.warmup_steps=1", "measure.repeats=1", "sweep_dir=out",
         "measure.reference_budget_s=0")  # fmt: skip
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
    records = read_records(folder / "out" / "records.jsonl")
    return folder / "out", {record["config"]["strategy"]: record for record in records}


def test_the_page_holds_a_whole_package_and_some_mistakes():
    assert {Path(path).name for path in FILES} == {"pyproject.toml", "facts.py", "attention.py"}
    assert {file for file, *_ in MISTAKES.values()} == {"facts.py", "attention.py"}


def test_every_path_that_the_page_names_is_there():
    named = set(re.findall(r"`((?:bench|analysis|tests|docs|conf)/[\w./]+)`", PAGE))
    assert len(named) > 20
    assert not [path for path in named if "gather_twice" not in path and not (REPOSITORY / path).exists()]


@walked
def test_the_pages_strategy_passes_the_gates_and_is_measured_beside_ours(swept):
    record = swept[1]["gather_twice"]
    assert record["status"] == swept[1]["ulysses"]["status"] == "ok", record["reason"]
    parity, objective = record["parity"], record["objective"]
    assert {"out", "dq", "dk", "dv"} <= parity["errors"].keys()
    assert "loss" in objective["errors"]
    for checked in (parity, objective):
        assert all(error <= checked["limits"][name] for name, error in checked["errors"].items())
    assert record["losses"]["tokens_digest"] == swept[1]["ulysses"]["losses"]["tokens_digest"]
    assert set(record["engagement"]["sent_bytes"]["attention"]) == {record["analytic"]["exchange_bytes"]}
    assert record["engagement"]["calls"]["attention all_gather"] == 2
    assert record["engagement"]["calls"]["attention reduce_scatter"] == 2


@walked
def test_the_record_says_whose_code_ran_in_which_version(swept):
    records = swept[1]
    assert records["gather_twice"]["environment"]["strategy_package"] == "gather-twice"
    assert records["gather_twice"]["environment"]["packages"]["gather-twice"] == "0.1.0"
    assert "gather_twice.attention" in records["gather_twice"]["engagement"]["modules"]
    assert "strategy_package" not in records["ulysses"]["environment"]
    assert "gather-twice" not in records["ulysses"]["environment"]["packages"]


@walked
def test_it_is_in_the_report_beside_ours(swept):
    with (swept[0] / "summary.csv").open() as file:
        speeds = {row["strategy"]: row["tokens_per_s"] for row in csv.DictReader(file)}
    assert float(speeds["gather_twice"]) > 0
    assert float(speeds["ulysses"]) > 0
    page = (swept[0] / "report.html").read_text()
    assert ">gather_twice<" in page
    assert "package gather-twice" in page
    assert "gather_twice" in (swept[0] / "summary.md").read_text()
    assert "gather_twice" in (swept[0] / "figures" / "throughput.svg").read_text()


@walked
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_of_the_page_is_a_wrong_result_in_the_pages_words(swept, name):
    record = swept[1][name]
    assert record["status"] == "wrong_result"
    assert MISTAKES[name][-1] in record["reason"].replace(name, "gather_twice")
    assert record["timing"] is None


@walked
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_its_attention_is_plain_attention_to_the_digits_of_every_dtype(
    launcher, tmp_path, monkeypatch, environment, world_size
):
    see_what_is_installed_now(monkeypatch)
    monkeypatch.setattr(sys, "path", [*environment["PYTHONPATH"].split(os.pathsep), *sys.path])
    cases = cover(["gather_twice"], world_size)
    assert {case[3] for case in cases} == {"fp64", "fp32", "bf16"}
    assert not beyond_their_limits(errors_of(launcher, tmp_path, cases, entry=check_installed_attention))


def check_installed_attention(job, log):
    """As `check_cases`, in a rank of a server that is older than the package."""
    see_what_is_installed_now(pytest.MonkeyPatch())
    return check_cases(job, log)


@walked
def test_the_pages_pytest_command_passes_and_runs_the_tests_of_strategies(environment):
    done = pytest_in(REPOSITORY, environment, "-v", *shlex.split(PYTEST))
    assert done.returncode == 0, done.stdout
    passed = {line.partition("::")[0] for line in done.stdout.splitlines() if " PASSED" in line}
    files = ("strategies/test_strategies", "cell/test_gates", "training/test_training_equivalence")
    assert passed >= {f"tests/bench/{file}.py" for file in files}


def pytest_in(folder, environment, *words):
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_no_test_of_a_page_is_for_a_strategy_that_the_page_cannot_know(monkeypatch):
    """`pytest -k gather_twice` would select it, and no package could pass."""
    monkeypatch.setattr(StrategyTable, "plugin_names", lambda _: ["gather_twice"])
    monkeypatch.setitem(STRATEGIES._loaded, "gather_twice", STRATEGIES["ring"])
    module = runpy.run_path(str(REPOSITORY / "tests" / "test_doc_formulas.py"))
    marks = [mark for each in module.values() for mark in getattr(each, "pytestmark", ())]
    assert "ulysses" in [name for mark in marks for name in mark.args[1]]
    assert not [mark for mark in marks if "gather_twice" in [*mark.args[1]]]


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
        text = re.sub(r"from bench import (.+)", from_homes, FILES[f"{name}/{name}/{file}"])
        (strategies / name / file).write_text(text)
    table = strategies / "__init__.py"
    imported = f"from bench.strategies.{name}.facts import GatherTwice\nfrom bench.strategies.local"
    text = table.read_text().replace("from bench.strategies.local", imported)
    table.write_text(text.replace("GatherKV(),", "GatherKV(),\n        GatherTwice(),"))
    (copy / "conf" / "strategy" / f"{name}.yaml").write_text(f"# Two gathers\nname: {name}\n")
    files = ("test_architecture", "test_docs", "test_doc_formulas", "bench/request/test_help")
    words = ("-m", "not ranks", "-k", "not three_examples", *(f"tests/{file}.py" for file in files))
    done = pytest_in(copy, os.environ | {"PYTHONPATH": str(copy)}, *words)
    assert done.returncode == 0, done.stdout


def from_homes(found):
    """The same names from where they are defined."""
    return "\n".join(f"from {HOMES[name]} import {name}" for name in found[1].split(", "))
