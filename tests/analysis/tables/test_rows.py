import io

import pytest
from rich.console import Console

from analysis.answers.reasons import failure_reasons
from analysis.tables.rows import HEADINGS, markdown_text, rows_of
from analysis.tables.terminal import DISPENSABLE, print_cells, print_table
from tests.analysis.predictions import make_predicted
from tests.analysis.records import (
    ATTENTION_CHECKED,
    STEPS_HELD,
    grid,
    make_failure,
    make_record,
    make_step,
    make_timing,
    make_trace,
)

STATUSES = {
    "out_of_memory": "OOM",
    "timed_out": "timed out",
    "wrong_result": "wrong result",
    "unsupported": "unsupported",
    "killed": "killed",
}


@pytest.mark.parametrize(("status", "shown"), STATUSES.items())
def test_a_failure_stands_in_the_markdown_with_its_reason(cells_of, status, shown):
    line = markdown_text(cells_of([make_failure(status, "because of it")])).splitlines()[2]
    assert f"| {shown} |" in line
    assert "because of it" in line


def test_a_pipe_a_newline_or_markup_in_a_reason_does_not_break_the_table(cells_of):
    text = markdown_text(cells_of([make_failure("error", "a | b\nc <script>")]))
    assert len(text.splitlines()) == 3
    assert "a \\| b c &lt;script&gt;" in text


def test_one_step_says_that_there_is_no_interval(cells_of):
    row = rows_of(cells_of([make_record(timing=make_timing([[100.0]] * 2))]))[0]
    assert row.spread == "n=1, no interval"


def test_eight_steps_show_their_interval(cells_of):
    steps = [[80.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 160.0]]
    row = rows_of(cells_of([make_record(timing=make_timing(steps, 8000))]))[0]
    assert (row.tokens_per_s, row.spread) == ("80,000", "n=8, 50,000 to 100,000")


def test_a_row_reads_in_a_person_s_units(cells_of):
    row = rows_of(cells_of([make_record()]))[0]
    assert (row.length, row.ranks, row.peak_allocated) == ("8k", "2/2", "2.0 GiB (2.5 %)")
    # 11 of 110 ms exposed, of which 3 are waiting.
    assert row.communication == "7.3 % / 2.7 %"
    assert (row.exchange_transfer, row.exchange_waiting, row.traced_steps) == ("3.6 %", "2.7 %", "n=1")


def test_several_traced_steps_show_their_range_and_how_many_are_void(cells_of):
    exposed = [([100.0] * 2, [4.0] * 2), ([100.0] * 2, [6.0] * 2), ([130.0] * 2, [50.0] * 2)]
    steps = [make_step(step_ms, exposed_ms) for step_ms, exposed_ms in exposed]
    row = rows_of(cells_of([make_record(trace=make_trace(2, steps=steps))]))[0]
    assert row.exchange_transfer == "2.0 % (1.0 % to 3.0 %)"
    assert row.exchange_waiting == "3.0 % (3.0 % to 3.0 %)"
    assert row.traced_steps == "n=2 of 3"


@pytest.mark.parametrize(
    ("checks", "shown"),
    [
        ([ATTENTION_CHECKED, STEPS_HELD], "2 of 2; 2 of 2"),
        ([ATTENTION_CHECKED | {"reason": "no"}, STEPS_HELD | {"steps": 0, "reason": "no"}], "1 of 2; 0 of 2"),
        ([STEPS_HELD | {"steps": None, "of_steps": None, "reason": "no"}], "0 of 1"),
        ([ATTENTION_CHECKED], "1 of 1"),
        ([ATTENTION_CHECKED | {"steps": 1, "of_steps": 3, "reason": "no"}], "1 of 1"),
        (None, ""),
    ],
)
def test_a_row_counts_checks_and_held_steps_and_no_check_twice(cells_of, checks, shown):
    assert rows_of(cells_of([make_record(checks=checks)]))[0].checks == shown


def test_every_row_has_every_heading(cells_of):
    summary = cells_of(grid(["local", "ulysses"], [8192, 65536]))
    assert all(len(row.texts()) == len(HEADINGS) for row in rows_of(summary))


def printed(width, what, *words):
    """The lines of a table in a terminal of this width, and the columns that had no room."""
    console = Console(width=width, file=io.StringIO())
    what(console, *words)
    text = console.file.getvalue()
    assert "…" not in text
    *lines, last = text.splitlines()
    assert max(map(len, lines)) <= width
    left_out = last.partition("summary.md: ")[2]
    return (lines, left_out.split(", ")) if left_out else ([*lines, last], [])


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_shows_what_matters_and_names_what_it_leaves_out(cells_of, width):
    records = grid(["deepspeed_ulysses", "ring_flash_attn_llama3"], [8192, 98304])
    records += [
        make_failure("unsupported", "x" * 300, config={"strategy": "ring", "sp_degree": n}) for n in (2, 3)
    ]
    (headings, *lines), left_out = printed(width, print_cells, cells_of(records))
    assert set(left_out) <= {*DISPENSABLE}
    for heading in ("strategy", "length", "ranks/sp", "status", "tokens/s", "peak"):
        assert heading in headings
    assert len(lines) == len(records)  # no line is folded
    assert len({tuple(line.split()[:3]) for line in lines}) == len(records)


def test_long_names_are_folded_and_numbers_are_not(cells_of):
    name, engines = "ring_flash_attn_llama3", ("fsdp2", "zero3")
    records = [make_record(config={"strategy": name, "engine": engine}) for engine in engines]
    (_, *lines), _ = printed(80, print_cells, cells_of(records))
    assert [line.split()[0] for line in lines] == [f"{name},", engines[0], f"{name},", engines[1]]
    assert "2.0 GiB" in lines[0]


@pytest.mark.parametrize(("width", "count"), [(51, 2), (52, 3)])
def test_a_table_that_is_too_wide_loses_its_last_columns(width, count):
    columns = {"strategy": ["ring"], "a" * 30: ["1"], "b" * 12: ["2"]}
    (headings, _), left_out = printed(width, print_table, columns)
    assert headings.split() == [*columns][:count]
    assert left_out == [*columns][count:]


@pytest.mark.parametrize(("failed", "shown"), [(1, "OOM (1 of 2)"), (2, "OOM")])
def test_a_status_says_how_many_repeats_met_it_where_not_all_did(cells_of, failed, shown):
    records = [
        make_failure("out_of_memory", "no", repeat=n) if n < failed else make_record(repeat=n) for n in (0, 1)
    ]
    assert rows_of(cells_of(records))[0].status == shown


def test_a_prediction_is_told_with_its_band_and_neither_samples_nor_an_interval(cells_of):
    cells = cells_of([make_predicted(), make_predicted(config={"seq_len": 65536}, fit="out_of_memory")])
    fits, runs_out = rows_of(cells)
    assert (fits.status, runs_out.status) == ("fits (predicted)", "OOM (predicted)")
    assert fits.tokens_per_s == "81,920 (65,536 to 102,400)"
    assert fits.step_time == "100 (80.0 to 125)"
    assert fits.peak_allocated == "2.0 GiB (1.8 GiB to 2.2 GiB), 2.5 %"
    assert fits.spread == "band of the model, with the rates of h100_80gb"
    assert (fits.exchange_waiting, fits.traced_steps, fits.traced_to_timed, fits.checks) == ("",) * 4
    assert (runs_out.tokens_per_s, runs_out.spread, runs_out.step_time) == ("", "", "")
    assert failure_reasons(cells) == ["OOM (predicted) (1), ulysses at 64k: needs more than it has"]


@pytest.mark.parametrize("beside", [[], [make_record()]])
def test_the_terminal_shows_bands_and_says_n_of_what_ran_only(cells_of, beside):
    (headings, *lines), _ = printed(130, print_cells, cells_of([make_predicted(), *beside]))
    assert any("65,536-102,400" in line for line in lines)
    assert ("95 % interval" in headings, " n " in headings) == (bool(beside), bool(beside))


def test_a_narrow_terminal_keeps_the_band_of_predictions(cells_of):
    config = {"strategy": "deepspeed_ulysses"}
    (_, line, *_), _ = printed(80, print_cells, cells_of([make_predicted(fit="undecided", config=config)]))
    assert "65,536-102,400" in line
