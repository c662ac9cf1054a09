"""`ulysses_ring_bench` has the names of `bench`, and refuses another project's `bench` in one sentence."""

import os
import subprocess
import sys

import pytest

from bench.common.environment import REPOSITORY

OURS = "from ulysses_ring_bench import StrategyFacts, read_records"
LIGHT = """
import sys, ulysses_ring_bench
assert "bench" not in sys.modules
from ulysses_ring_bench import StrategyFacts, Cell
assert "torch" not in sys.modules
import bench, analysis, run_sweep
assert (bench.StrategyFacts, bench.Cell) == (StrategyFacts, Cell)
assert not hasattr(ulysses_ring_bench, "Offer")
"""
COMMAND = """
import sys, ulysses_ring_bench.command
FIRST
sys.argv = ["ulysses-ring-bench", "report", "--help"]
sys.exit(ulysses_ring_bench.command.main())
"""


def run(folder, script):
    (folder / "train.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environment.pop("PYTHONSAFEPATH", None)  # the fork server of this process may have set it
    command = [sys.executable, "train.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def other_project(tmp_path):
    """Folder with another project's `bench/` and `analysis/`."""
    for name in ("bench", "analysis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    return tmp_path


def test_both_import_names_are_lazy_and_give_the_same_objects(tmp_path):
    done = run(tmp_path, LIGHT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", [OURS, f"import bench\n{OURS}"])
def test_script_next_to_another_bench_is_refused_by_folder(other_project, script):
    done = run(other_project, script)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert str(other_project / "bench") in line
    assert "rename the other one" in line


def test_command_is_refused_after_another_bench_was_imported(other_project):
    assert run(other_project, COMMAND.replace("FIRST", "")).returncode == 0
    done = run(other_project, COMMAND.replace("FIRST", "import bench"))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert str(other_project / "bench") in done.stderr
