"""The table of the longest sequences that trained."""

import pytest

from analysis.answers.next_steps import deciding_command
from analysis.read.views import View
from analysis.show.page.page import render
from analysis.show.sections import sections_of
from analysis.show.sections.max_length import max_length_section
from tests.support.records import FAILED, make_record
from tests.support.sections import findings_of, rows_by_heading

NO_ROOM = "rank 1, timing backward: no room for 2.0 MiB more of host memory"
STATUSES = {
    "ring": [(12, "out_of_memory"), (11, "out_of_memory"), (9, "ok"), (10, "ok")],
    "ulysses": [(8, "ok"), (9, "ok"), (11, "timed_out")],
    "usp": [(4, "out_of_memory"), (5, "ok")],
    "deepspeed_ulysses": [(1, "out_of_memory")],
}
"""Lengths of each strategy in thousands of tokens, with statuses, in the order in which they ran."""


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
def findings(tmp_path_factory):
    runs = [(name, *run) for name, runs in STATUSES.items() for run in runs]
    records = [record_of(*run, order) for order, run in enumerate(runs)]
    return findings_of(tmp_path_factory.mktemp("longest"), records)


@pytest.fixture(scope="module")
def section(findings):
    return max_length_section(findings)


def by_name(section, view=View.SUMMARY):
    return {row["series"]: row for row in rows_by_heading(section.table, view)}


def test_series_row_has_longest_and_shortest_out_of_memory(section):
    rows = by_name(section)
    ring, none = rows["ring"], rows["deepspeed_ulysses"]
    headings = ["longest that trained", "shortest out of memory", "tokens/s at the longest"]
    assert [ring[heading] for heading in headings[:2]] == ["10k", "11k"]
    assert (ring["peak at the longest"], ring["capacity (share used)"]) == ("2.0 GiB", "limit 4 GiB, 50.0 %")
    assert ring["what ended the search"] == f"11k: OOM: {NO_ROOM}"
    assert [none[heading] for heading in headings] == ["none", "1k", ""]
    assert "capacity (share used)" not in by_name(section, View.TERMINAL)["ring"]


def test_timeout_is_not_counted_as_out_of_memory(section):
    row = by_name(section)["ulysses"]
    assert (row["longest that trained"], row["shortest out of memory"]) == ("9k", "none")
    assert row["what ended the search"].startswith("11k: timed out: ")
    assert any("ulysses" in line and "11k (timed out)" in line for line in section.lines)


def test_shorter_length_out_of_memory_is_reported(section):
    (line,) = [line for line in section.lines if "trained" in line]
    assert "usp: 4k ran out of memory but 5k trained" in line


def test_page_has_the_table_and_no_command_repeats_the_search(findings):
    page = render(findings, sections_of(findings))
    assert "<h2>The longest sequence that trains" in page
    assert f"11k: OOM: {NO_ROOM}" in page
    assert deciding_command(findings.archive) is None
