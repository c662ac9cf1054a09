"""Readers of any records.jsonl return records, or raise an error of one line that names file and line."""

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.read.archive import read_archive
from bench.record.record import Record
from bench.record.store import StoreError, read_records
from tests.support.fuzzing import as_line, changed_bytes, changed_json, few_and_many, fuzz
from tests.support.records import make_record

SOUND = make_record()
LINE = as_line(SOUND)
CONTENTS = {
    "bytes": st.binary(max_size=200),
    "lines": st.lists(st.binary(max_size=40)).map(b"\n".join),
    "changed bytes": changed_bytes(LINE * 2),
    "changed values": st.lists(changed_json(SOUND).map(as_line), min_size=1, max_size=3).map(b"".join),
}


def archive(folder):
    records = read_archive([folder], {"h100_80gb": 1e15})
    return [records.record(row) for row in range(len(records.frame))]


READERS = {"the store": lambda folder: read_records(folder / "records.jsonl"), "the report": archive}


def outcome(reader, folder):
    """Records, or the text of the reader's error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a torn line
            return reader(folder)
    except StoreError as error:
        return str(error)


@few_and_many()
@pytest.mark.parametrize("kind", CONTENTS)
def test_readers_return_records_or_a_one_line_error(tmp_path, kind, examples):
    path = tmp_path / "records.jsonl"

    @given(CONTENTS[kind])
    def check(content):
        path.write_bytes(content)
        for reader in READERS.values():
            found = outcome(reader, tmp_path)
            if isinstance(found, str):
                assert re.fullmatch(rf"{re.escape(str(tmp_path))}[^\n]*", found)
            else:
                assert all(isinstance(each, Record) for each in found)
                assert len(found) <= content.count(b"\n")

    fuzz(examples, check)
