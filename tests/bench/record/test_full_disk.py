"""A disk that is full ends a sweep with one line; what was written before stays whole."""

import resource
import shlex
import sys
import warnings
from contextlib import contextmanager

import pytest

from bench.record.store import write_whole
from tests.support.command import typed_here
from tests.support.records import read_lines


@contextmanager
def largest_file(size_bytes):
    """Files that may not grow beyond this, as on a disk with so much room.

    No bytecode is written meanwhile: Python keeps a part of it where no more can be written, and then fails.
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
def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "report.html"
    write_whole(path, "before")
    with largest_file(4096), pytest.raises(OSError, match=r"report\.html") as raised:
        write_whole(path, "x" * 10_000)
    assert raised.value.filename == str(path)
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.fault(15)
def test_a_sweep_says_which_file_and_goes_on_by_the_command_it_prints(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.report.write_report", lambda _: True)
    words = ("-m", "mode=predict", "hardware=h100_80gb", "cluster.world_size=8", "strategy=ulysses,ring")
    with largest_file(8_000):
        done = typed_here(tmp_path, *words, "sweep_dir=out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "out/records.jsonl: File too large; the records of cells that have ended are kept" in done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a torn line
        assert len(read_lines(tmp_path / "out" / "records.jsonl")) == 1
    again = shlex.split(done.stderr.rpartition("then: ")[2])
    assert typed_here(tmp_path, *again[2:]).returncode == 0
    assert len(read_lines(tmp_path / "out" / "records.jsonl")) == 2
