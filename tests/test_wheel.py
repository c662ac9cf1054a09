"""The wheel, installed outside the checkout, runs from any folder, also beside a `bench/` not ours."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from bench.common.environment import REPOSITORY
from tests.support.command import NO_GPU
from tests.support.records import read_lines
from tests.test_your_strategy import FILES, write_package

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
PIP = [sys.executable, "-m", "pip", "--quiet"]
ALONE = ("--no-deps", "--no-build-isolation", "--no-index")
CELL = ("seq_len=256", "measure.steps=2", "measure.warmup_steps=1", "measure.trace=false", "sweep_dir=out")
OBSERVED = "import ulysses_ring_bench, bench; print(ulysses_ring_bench.observe, bench.observe)"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "sweeps", "tests")
    return shutil.copytree(REPOSITORY, folder, ignore=ignored)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """A folder with the package of docs/your_strategy.md for each name that it may import from."""
    written, site = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("plugins")
    other = {path: text.replace("from bench", "from ulysses_ring_bench") for path, text in FILES.items()}
    packages = [write_package(written, "by_bench", FILES), write_package(written, "by_long_name", other)]
    subprocess.run([*PIP, "install", *ALONE, "--target", site, *packages], check=True)
    return site


@pytest.fixture(scope="module")
def installed(tmp_path_factory, plugins, source):
    """The interpreter of an environment with the wheel, the plugins and this one's packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # Python does not read the .pth files of folders named so, of which one leads to this checkout.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join([str(plugins), *others]))
    subprocess.run([*PIP, "--python", python, "install", *ALONE, source], check=True)
    return python


@pytest.fixture
def beside_theirs(tmp_path):
    """A folder with a `bench` and an `analysis` of somebody's own."""
    for name in ("bench", "analysis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('theirs')\n")
    return tmp_path


def run(folder, *words):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | NO_GPU
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_puts_one_name_into_an_environment(installed):
    (information,) = installed.parent.parent.glob("lib/*/site-packages/ulysses_ring_bench-*.dist-info")
    files = [line.partition("/") for line in (information / "RECORD").read_text().splitlines()]
    assert {first for first, *_ in files} == {"..", information.name, "ulysses_ring_bench"}


def test_the_command_and_its_tools_run_beside_folders_of_their_names(installed, beside_theirs):
    command = installed.with_name("ulysses-ring-bench")
    said = run(beside_theirs, command, *CELL, "strategy=ulysses")
    (record,) = read_lines(beside_theirs / "out" / "records.jsonl")
    assert record["status"] == "ok"
    assert (record["environment"]["git_commit"], record["environment"]["git_dirty"]) == (None, None)
    assert record["environment"]["packages"]["ulysses-ring-bench"] == "0.1.0"
    assert "report: out/report.html" in said
    assert "ulysses" in run(beside_theirs, command, "report", "out")
    assert "usage: " in run(beside_theirs, command, "compare", "--help")
    assert run(beside_theirs, command, "--plan", "-m", "seq_len=8k,64k").count("fits") >= 6
    assert "8k" in run(beside_theirs, command, "--cfg", "job")
    assert "usage: " in run(beside_theirs, installed, "-m", "ulysses_ring_bench.command", "report", "--help")


def test_a_script_and_a_plugin_on_ranks_import_by_either_name(installed, tmp_path):
    (tmp_path / "train.py").write_text(OBSERVED)
    assert run(tmp_path, installed, "train.py").count("function observe") == 2
    command = installed.with_name("ulysses-ring-bench")
    run(tmp_path, command, "-m", "strategy=by_bench,by_long_name", *CELL)
    records = read_lines(tmp_path / "out" / "records.jsonl")
    found = {record["config"]["strategy"]: record["status"] for record in records}
    assert {found["by_bench"], found["by_long_name"]} == {"ok"}
