"""`ulysses_ring_bench` gives what `bench` gives, and refuses in a sentence a `bench` of somebody else."""

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
    environment.pop("PYTHONSAFEPATH", None)  # a fork server of this process may have set it
    command = [sys.executable, "train.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def theirs(tmp_path):
    """A folder with a `bench/` and an `analysis/` of somebody's own."""
    for name in ("bench", "analysis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    return tmp_path


def test_nothing_is_imported_at_start_and_both_names_give_the_same(tmp_path):
    done = run(tmp_path, LIGHT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", [OURS, f"import bench\n{OURS}"])
def test_a_script_beside_another_bench_ends_in_a_sentence_that_names_its_folder(theirs, script):
    done = run(theirs, script)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert str(theirs / "bench") in line
    assert "rename the other one" in line


def test_the_command_takes_ours_and_is_refused_where_another_is_imported_already(theirs):
    assert run(theirs, COMMAND.replace("FIRST", "")).returncode == 0
    done = run(theirs, COMMAND.replace("FIRST", "import bench"))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert str(theirs / "bench") in done.stderr
