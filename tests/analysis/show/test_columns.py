import io
from dataclasses import replace

import pytest
from rich.console import Console

from analysis.answers.no_result import failure_reasons
from analysis.read.views import View
from analysis.show.columns import DISPENSABLE, OUTSIDE_BYTES, columns_of, named_rows
from analysis.show.markdown import markdown_table
from analysis.show.section import Column, Section, Table
from analysis.show.terminal import print_section, print_table
from bench.common.labels import GIB, MIB
from tests.support.records import (
    ATTENTION_CHECKED,
    TRAINING_COMPARED,
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_step,
    make_timing,
    make_trace,
)
from tests.support.sections import rows_of

TRANSFER, WAITING = "attention communication: transfer", "attention communication: waiting"


def table_of(cells):
    return Table.from_items(columns_of(cells), named_rows(cells), DISPENSABLE)


def test_markdown_escapes_pipe_newline_and_markup_in_a_reason(cells_of):
    table = table_of(cells_of([make_failure("out_of_memory", "a | b\nc <script>")]))
    lines = markdown_table(table.in_view(View.SUMMARY)).splitlines()
    assert len(lines) == 3
    assert lines[0] == "| strategy | length | ranks/sp | status | note |"  # no column without a text
    assert "| OOM |" in lines[2]
    assert "a \\| b c &lt;script&gt;" in lines[2]


def test_row_has_readable_units(cells_of):
    eight = [[80.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 160.0]]
    spreads = [
        rows_of(cells_of([make_record(timing=make_timing(ms, 8000))]), View.SUMMARY)[0]["n and 95 % interval"]
        for ms in (eight, [[100.0]])
    ]
    assert spreads == ["n=8, 50,000 to 100,000", "n=1, no interval"]
    (row,) = rows_of(cells_of([make_record()]), View.SUMMARY)
    assert (row["length"], row["ranks/sp"]) == ("8k", "2/2")
    assert row["peak allocated (of capacity)"] == "2.0 GiB (2.5 %)"
    # 11 of 110 ms exposed, of which 3 are waiting.
    assert row["all communication: transfer / waiting"] == "7.3 % / 2.7 %"
    assert (row[TRANSFER], row[WAITING], row["traced steps"]) == ("3.6 %", "2.7 %", "n=1")


@pytest.mark.parametrize(("outside", "text"), [(MIB, ""), (OUTSIDE_BYTES, " + 128.0 MiB outside torch")])
def test_memory_outside_torch_stands_next_to_the_peak(cells_of, outside, text):
    memory = {"peak_allocated_bytes": [2 * GIB] * 2, "outside_allocator_bytes": [MIB, outside]}
    cells = cells_of([make_record(memory=memory)])
    (row,), (printed,) = rows_of(cells, View.SUMMARY), rows_of(cells, View.TERMINAL)
    assert row["peak allocated (of capacity)"] == "2.0 GiB (2.5 %)" + text
    assert printed["peak"] == "2.0 GiB" + text


def test_traced_steps_show_range_and_number_left_out(cells_of):
    exposed = [([100.0] * 2, [4.0] * 2), ([100.0] * 2, [6.0] * 2), ([130.0] * 2, [50.0] * 2)]
    steps = [make_step(step_ms, exposed_ms) for step_ms, exposed_ms in exposed]
    (row,) = rows_of(cells_of([make_record(trace=make_trace(2, steps=steps))]), View.SUMMARY)
    assert row[TRANSFER] == "2.0 % (1.0 % to 3.0 %)"
    assert row[WAITING] == "3.0 % (3.0 % to 3.0 %)"
    assert row["traced steps"] == "n=2 of 3"


@pytest.mark.parametrize(
    ("checks", "shown"),
    [
        ([ATTENTION_CHECKED, TRAINING_COMPARED], "2 of 2; 2 of 2"),
        (
            [ATTENTION_CHECKED | {"reason": "no"}, TRAINING_COMPARED | {"steps": 0, "reason": "no"}],
            "1 of 2; 0 of 2",
        ),
        ([TRAINING_COMPARED | {"steps": None, "of_steps": None, "reason": "no"}], "0 of 1"),
        ([ATTENTION_CHECKED], "1 of 1"),
        ([ATTENTION_CHECKED | {"steps": 1, "of_steps": 3, "reason": "no"}], "1 of 1"),
        (None, ""),
    ],
)
def test_row_counts_checks_and_compared_steps_once(cells_of, checks, shown):
    (row,) = rows_of(cells_of([make_record(checks=checks)]), View.SUMMARY)
    assert row.get("checks made; steps compared", "") == shown


def printed(width, table):
    """Return the lines of a table in a terminal of this width, and the columns that were left out."""
    console = Console(width=width, file=io.StringIO())
    print_table(console, table)
    text = console.file.getvalue()
    assert "…" not in text
    *lines, last = text.splitlines()
    assert max(map(len, lines)) <= width
    left_out = last.partition("summary.md: ")[2]
    return (lines, left_out.split(", ")) if left_out else ([*lines, last], [])


def test_narrow_terminal_names_the_columns_it_leaves_out(cells_of):
    records = grid(["deepspeed_ulysses", "ring_flash_attn_llama3"], [8192, 98304])
    records += [
        make_failure("unsupported", "x" * 300, config={"strategy": "ring", "sp_degree": n}) for n in (2, 3)
    ]
    (headings, *lines), left_out = printed(80, table_of(cells_of(records)))
    assert left_out
    assert set(left_out) <= {*DISPENSABLE}
    for heading in ("strategy", "length", "ranks/sp", "status", "tokens/s", "peak"):
        assert heading in headings
    assert len(lines) == len(records)  # no line is wrapped
    assert len({tuple(line.split()[:3]) for line in lines}) == len(records)


def test_long_names_are_wrapped_and_numbers_are_not(cells_of):
    name, engines = "ring_flash_attn_llama3", ("fsdp2", "zero3")
    records = [make_record(config={"strategy": name, "engine": engine}) for engine in engines]
    (_, *lines), _ = printed(80, table_of(cells_of(records)))
    assert [line.split()[0] for line in lines] == [f"{name},", engines[0], f"{name},", engines[1]]
    assert "2.0 GiB" in lines[0]


@pytest.mark.parametrize(("width", "count"), [(51, 2), (52, 3)])
def test_wide_table_loses_its_last_columns(width, count):
    names = ["strategy", "a" * 30, "b" * 12]
    columns = [Column(name, str, is_words=name == "strategy") for name in names]
    (headings, _), left_out = printed(width, Table(columns, [["ring", "1", "2"]]))
    assert headings.split() == names[:count]
    assert left_out == names[count:]


def test_terminal_shows_marked_parts_and_wraps_no_command():
    command = f"to decide, run: python run_sweep.py {'x' * 100}"
    table = Table([Column("strategy", str)], [["ring"]])
    whole = Section("A", [command, "y " * 80], table, parts=[Section("P", ["z"])])
    for section, shown in (
        (whole, []),
        (replace(whole, prints_table=True), ["strategy", "ring"]),
        (replace(whole, prints_lines=True), [command, ("y " * 40).strip(), ("y " * 40).strip(), "P: z"]),
    ):
        console = Console(width=80, file=io.StringIO())
        print_section(console, section)
        assert [line.strip() for line in console.file.getvalue().splitlines()] == shown


@pytest.mark.parametrize(("failed", "shown"), [(1, "OOM (1 of 2)"), (2, "OOM")])
def test_status_counts_failed_repeats_if_some_worked(cells_of, failed, shown):
    records = [
        make_failure("out_of_memory", "no", repeat=n) if n < failed else make_record(repeat=n) for n in (0, 1)
    ]
    assert rows_of(cells_of(records), View.SUMMARY)[0]["status"] == shown


def test_prediction_row_has_band_and_no_samples_or_interval(cells_of):
    cells = cells_of([make_predicted(), make_predicted(config={"seq_len": 65536}, fit="out_of_memory")])
    fits, runs_out = rows_of(cells, View.SUMMARY)
    assert (fits["status"], runs_out["status"]) == ("fits (predicted)", "OOM (predicted)")
    assert fits["tokens/s"] == "81,920 (65,536 to 102,400)"
    assert fits["step time (ms)"] == "100 (80.0 to 125)"
    assert fits["peak allocated (of capacity)"] == "2.0 GiB (1.8 GiB to 2.2 GiB), 2.5 %"
    assert not {WAITING, "n and 95 % interval", "traced steps", "traced / timed"} & {*fits}
    assert [runs_out[name] for name in ("tokens/s", "step time (ms)")] == ["", ""]
    (reason,) = failure_reasons(cells)
    assert reason.startswith("OOM (predicted)")
    assert reason.endswith("ulysses at 64k: needs more than it has")


@pytest.mark.parametrize("measured", [[], [make_record()]])
def test_terminal_shows_bands_and_n_only_for_measured_cells(cells_of, measured):
    (headings, *lines), _ = printed(
        130 if measured else 80, table_of(cells_of([make_predicted(), *measured]))
    )
    assert any("81,920 (65,536 to 102,400)" in line for line in lines)
    assert ("95 % interval" in headings, " n " in headings) == (bool(measured), bool(measured))
