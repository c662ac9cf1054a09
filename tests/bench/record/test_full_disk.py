"""A full disk ends a sweep with one line, and earlier content stays valid."""

import resource
import shlex
import sys
import warnings
from contextlib import contextmanager

import pytest

from bench.record.store import write_atomically
from tests.support.command import run_command_here
from tests.support.records import read_lines


@contextmanager
def largest_file(size_bytes):
    """Limit the size of files, like a disk with that much room.

    Python must not write bytecode here: it would keep an incomplete file and fail later.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault(15)
def test_write_whole_keeps_the_old_file_on_a_full_disk(tmp_path):
    path = tmp_path / "report.html"
    write_atomically(path, "before")
    with largest_file(4096), pytest.raises(OSError, match=r"report\.html") as raised:
        write_atomically(path, "x" * 10_000)
    assert raised.value.filename == str(path)
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.fault(15)
def test_sweep_on_a_full_disk_resumes_by_its_printed_command(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.report.write_report", lambda _: True)
    words = ("-m", "mode=predict", "hardware=h100_80gb", "cluster.world_size=8", "strategy=ulysses,ring")
    with largest_file(8_000):
        done = run_command_here(tmp_path, *words, "sweep_dir=out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "out/records.jsonl: File too large; records of finished cells are kept" in done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a torn line
        assert len(read_lines(tmp_path / "out" / "records.jsonl")) == 1
    again = shlex.split(done.stderr.rpartition("then run: ")[2])
    assert run_command_here(tmp_path, *again[2:]).returncode == 0
    assert len(read_lines(tmp_path / "out" / "records.jsonl")) == 2
