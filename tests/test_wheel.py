"""The wheel, installed outside the checkout, runs from any folder, also beside a `bench/` not ours."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from bench.environment import REPOSITORY
from bench.store import read_records
from tests.command import NO_GPU

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
CELL = ("seq_len=256", "strategy=ulysses", "measure.steps=2", "measure.warmup_steps=1", "measure.trace=false")
OBSERVED = """
import bench, ulysses_ring_bench
assert bench.WHOSE == "theirs"
print(ulysses_ring_bench.observe.__module__, ulysses_ring_bench.read_records)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the wheel, and with this one's packages but for the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip"]
    source = folder / "source"  # building leaves a folder build/ behind, which the next build would take up
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "sweeps", "tests")
    shutil.copytree(REPOSITORY, source, symlinks=True, ignore=ignored)
    made = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(made, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    found = folder / "env" / "bin" / "python"
    place = f"python{sysconfig.get_python_version()}"
    site = folder / "env" / "lib" / place / "site-packages"
    subprocess.run(
        [*pip, "--python", str(found), "install", "--no-deps", str(wheel)], check=True, capture_output=True
    )
    others = [path for path in sys.path if path.endswith("site-packages")]
    # Named as a path their own .pth files are not read, of which one leads to the checkout.
    (site / "dependencies.pth").write_text("\n".join(others))
    return found


@pytest.fixture
def beside_theirs(tmp_path):
    """A folder with a `bench` and an `analysis` of somebody's own."""
    for name in ("bench", "analysis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("WHOSE = 'theirs'\n")
    return tmp_path


def run(folder, *words):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | NO_GPU
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_checkout_cannot_be_imported_there(python, tmp_path):
    said = run(tmp_path, python, "-c", "import bench, analysis, run_sweep; print(bench.__file__)")
    assert said.startswith(str(python.parent.parent))


def test_the_command_and_its_tools_run_beside_folders_of_their_names(python, beside_theirs):
    command = python.with_name("ulysses-ring-bench")
    said = run(beside_theirs, command, *CELL)
    (sweep,) = (beside_theirs / "results" / "sweeps").iterdir()
    (record,) = read_records(sweep / "records.jsonl")
    assert record["status"] == "ok"
    assert (record["environment"]["git_commit"], record["environment"]["git_dirty"]) == (None, None)
    assert record["environment"]["packages"]["ulysses-ring-bench"] == "0.1.0"
    assert f"report: results/sweeps/{sweep.name}/report.html" in said
    assert "ulysses" in run(beside_theirs, command, "report", sweep)
    assert "usage: " in run(beside_theirs, command, "compare", "--help")
    assert run(beside_theirs, command, "--plan", "-m", "seq_len=8k,64k").count("fits") >= 6
    assert f"{command} -m" in run(beside_theirs, command, "advise", "model=qwen3_8b", "hardware=h100_80gb")
    assert "8k" in run(beside_theirs, command, "--cfg", "job")


def test_as_a_module_where_theirs_comes_first_on_the_path(python, beside_theirs):
    run(beside_theirs, python, "-m", "ulysses_ring_bench.command", *CELL, "sweep_dir=out")
    (record,) = read_records(beside_theirs / "out" / "records.jsonl")
    assert record["status"] == "ok"
    (beside_theirs / "train.py").write_text(OBSERVED)
    assert run(beside_theirs, python, "train.py").startswith("ulysses_ring_bench.bench.observation")
