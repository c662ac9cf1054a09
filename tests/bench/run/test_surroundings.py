"""The real command in unusual folders and environments."""

import os
import shutil
import subprocess
import sys

import pytest
from msgspec import to_builtins

from bench.common.environment import REPOSITORY, describe_environment
from tests.support.command import run_command, run_command_here


def refused(type_, folder, *words, **environment):
    before = sorted(folder.rglob("*"))
    done = type_(folder, *words, **environment)
    assert (done.returncode, sorted(folder.rglob("*")), done.stdout) == (2, before, "")
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/sweep"])
@pytest.mark.fault(20)
def test_sweep_dir_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "taken").touch()
    folder = {"a file": tmp_path / "taken", "below a file": tmp_path / "taken" / "x"}.get(place, place)
    line = refused(run_command_here, tmp_path, "seq_len=256", f"sweep_dir={folder}")
    assert f"sweep_dir={folder}: cannot be written to" in line


def test_a_refusal_reads_the_same_in_a_poor_environment(tmp_path):
    poor = {"HOME": None, "LC_ALL": "C", "COLUMNS": "20", "PATH": "", "OMP_NUM_THREADS": "0", "TERM": "dumb"}
    assert "did you mean seq_len?" in refused(run_command, tmp_path, "seqlen=8k", **poor)


def test_code_without_its_choices_says_where_to_run_it(tmp_path):
    for name in ("bench", "analysis", "hydra_plugins"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "run_sweep.py", tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(tmp_path / "run_sweep.py"), "seq_len=8k"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "pip install -e ." in done.stderr


def test_without_git_a_record_says_that_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    environment = to_builtins(describe_environment({}))
    assert (environment["git_commit"], environment["git_dirty"]) == (None, None)
