import os

import pytest

from analysis.tables.csv_file import csv_writer, forked_with
from tests.analysis.records import grid


@pytest.fixture
def summary(summary_of):
    return summary_of(grid(["ulysses", "ring"], [8192, 16384]))


def test_another_process_writes_what_this_one_would(summary, tmp_path, monkeypatch):
    alone, forked = tmp_path / "alone.csv", tmp_path / "forked.csv"
    csv_writer(summary, alone)()
    with forked_with(summary) as other:
        assert other.submit(os.getpid).result() != os.getpid()
        monkeypatch.delattr("analysis.tables.csv_file.write_pieces")  # from this process alone
        csv_writer(summary, forked, other)()
        assert forked.read_bytes() == alone.read_bytes()
    assert alone.read_text().count("\n") == len(summary) + 1


@pytest.mark.parametrize("forks", [True, False])
def test_the_error_of_a_file_that_cannot_be_written_names_it(summary, tmp_path, forks):
    path = tmp_path / "summary.csv"
    path.mkdir()
    other = forked_with(summary) if forks else None
    with pytest.raises(IsADirectoryError) as raised:
        csv_writer(summary, path, other)()
    assert raised.value.filename == str(path)
    if other:
        other.shutdown()
