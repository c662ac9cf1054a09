"""The table of the longest sequences that trained."""

import pytest

from analysis.answers.verdict import verdict
from analysis.cells.cells import Cells
from analysis.read.archive import read_archive
from analysis.report import _deciding_command
from analysis.show.page.page import render
from analysis.show.tables.max_length import (
    HEADINGS,
    SHORT_HEADINGS,
    longest_lengths,
    max_length_lines,
    max_length_rows,
    max_length_short_rows,
)
from tests.support.records import FAILED, make_record, write_sweep

NO_ROOM = "rank 1, timing backward: no room for 2.0 MiB more of host memory"
STATUSES = {
    "ring": [(12, "out_of_memory"), (11, "out_of_memory"), (9, "ok"), (10, "ok")],
    "ulysses": [(8, "ok"), (9, "ok"), (11, "timed_out")],
    "usp": [(4, "out_of_memory"), (5, "ok")],
    "deepspeed_ulysses": [(1, "out_of_memory")],
}
"""Per strategy its thousands of tokens in the order in which they were tried."""


def record_of(strategy, kilo, status, order):
    broken = {} if status == "ok" else FAILED | {"status": status, "reason": NO_ROOM}
    config = {"strategy": strategy, "seq_len": 1024 * kilo, "cluster.memory_limit_gib": 4.0}
    return make_record(
        config=config | {"experiment": "max_length"},
        experiment="max_length",
        order=order,
        environment={"device_name": "NVIDIA H100 80GB HBM3", "argv": ["run_sweep.py", "-m"]},
        **broken,
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longest")
    tried = [(name, *each) for name, its in STATUSES.items() for each in its]
    write_sweep(folder, [record_of(*each, order) for order, each in enumerate(tried)])
    return read_archive([folder], {})


@pytest.fixture(scope="module")
def found(archive):
    return longest_lengths(Cells.of_records(archive.frame), archive.frame)


def by_name(headings, rows):
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


def test_each_series_has_its_longest_with_what_a_longer_one_ran_into(found):
    rows = by_name(HEADINGS, max_length_rows(found))
    ring, none = rows["ring"], rows["deepspeed_ulysses"]
    assert [ring[heading] for heading in HEADINGS[1:4]] == ["10k", "11k", "12k"]
    assert (ring["peak at the longest"], ring["of"]) == ("2.0 GiB", "limit 4 GiB, 50.0 %")
    assert ring["what ended the search"] == f"11k: OOM: {NO_ROOM}"
    assert [none[heading] for heading in HEADINGS[1:5]] == ["none", "1k", "1k", ""]
    short = by_name(SHORT_HEADINGS, max_length_short_rows(found))
    assert short["ring"]["ran out in"] == "rank 1, timing backward"


def test_another_end_is_never_counted_as_running_out_of_memory(found):
    row = by_name(HEADINGS, max_length_rows(found))["ulysses"]
    assert (row["longest that trained"], row["shortest out of memory"]) == ("9k", "none")
    assert row["what ended the search"].startswith("11k: timed out: ")
    assert any("ulysses: the search ended at 11k with timed out" in line for line in max_length_lines(found))


def test_a_shorter_length_that_ran_out_is_said(found):
    said = "usp: 4k ran out of memory and 5k trained"
    assert said in by_name(HEADINGS, max_length_rows(found))["usp"]["what ended the search"]
    assert [line for line in max_length_lines(found) if "trained" in line] == [
        f"{said}: the longest length depends on more than the length."
    ]


def test_the_page_has_the_table_and_nobody_is_told_to_repeat_the_search(archive, found):
    cells = Cells.of_records(archive.frame)
    page = render(archive, cells, verdict(cells), [], None, longest=found)
    assert "<h2>The longest sequence that trains" in page
    assert f"11k: OOM: {NO_ROOM}" in page
    assert _deciding_command(archive) is None
