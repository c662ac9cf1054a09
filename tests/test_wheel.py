"""The wheel, installed outside of the checkout, runs in any folder, also one with another `bench/`."""

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
    """Return a copy of the checkout, because a build leaves files behind."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "sweeps", "tests")
    return shutil.copytree(REPOSITORY, folder, ignore=ignored)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """Return a folder with the package of docs/your_strategy.md, once for each of our package names."""
    written, site = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("plugins")
    other = {path: text.replace("from bench", "from ulysses_ring_bench") for path, text in FILES.items()}
    packages = [write_package(written, "by_bench", FILES), write_package(written, "by_long_name", other)]
    subprocess.run([*PIP, "install", *ALONE, "--target", site, *packages], check=True)
    return site


@pytest.fixture(scope="module")
def installed(tmp_path_factory, plugins, source):
    """Return the interpreter of an environment with the wheel, the plugins and the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # Python ignores .pth files in folders that a .pth file names; one of them leads to this checkout.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join([str(plugins), *others]))
    subprocess.run([*PIP, "--python", python, "install", *ALONE, source], check=True)
    return python


@pytest.fixture
def foreign_folder(tmp_path):
    """Return a folder with another `bench` and another `analysis`."""
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


def test_wheel_installs_a_single_package_name(installed):
    (information,) = installed.parent.parent.glob("lib/*/site-packages/ulysses_ring_bench-*.dist-info")
    files = [line.partition("/") for line in (information / "RECORD").read_text().splitlines()]
    assert {first for first, *_ in files} == {"..", information.name, "ulysses_ring_bench"}


def test_installed_command_ignores_local_bench_folders(installed, foreign_folder):
    command = installed.with_name("ulysses-ring-bench")
    output = run(foreign_folder, command, *CELL, "strategy=ulysses")
    (record,) = read_lines(foreign_folder / "out" / "records.jsonl")
    assert record["status"] == "ok"
    assert (record["environment"]["git_commit"], record["environment"]["git_dirty"]) == (None, None)
    assert record["environment"]["packages"]["ulysses-ring-bench"] == "0.1.0"
    assert "report: out/report.html" in output
    assert "ulysses" in run(foreign_folder, command, "report", "out")
    assert "usage: " in run(foreign_folder, command, "compare", "--help")
    assert run(foreign_folder, command, "--plan", "-m", "seq_len=8k,64k").count("fits") >= 6
    assert "8k" in run(foreign_folder, command, "--cfg", "job")
    assert "usage: " in run(foreign_folder, installed, "-m", "ulysses_ring_bench.command", "report", "--help")


def test_script_and_plugins_import_by_either_package_name(installed, tmp_path):
    (tmp_path / "train.py").write_text(OBSERVED)
    assert run(tmp_path, installed, "train.py").count("function observe") == 2
    command = installed.with_name("ulysses-ring-bench")
    run(tmp_path, command, "-m", "strategy=by_bench,by_long_name", *CELL)
    records = read_lines(tmp_path / "out" / "records.jsonl")
    statuses = {record["config"]["strategy"]: record["status"] for record in records}
    assert {statuses["by_bench"], statuses["by_long_name"]} == {"ok"}
