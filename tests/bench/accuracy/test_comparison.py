"""Errors are those of predictions against measured cells, and a missed goal is said."""

from dataclasses import replace

import pytest

from bench.accuracy.cells import CELLS, command_lines
from bench.accuracy.comparison import Score, compared, score_lines, table
from bench.config import ConfigError
from bench.cost.band import Band
from bench.cost.fit import Fit
from bench.cost.prediction import predict
from bench.request.hardware import hardware_of
from bench.strategies import STRATEGIES
from tests.cells import make_cell

HARDWARE = hardware_of("h100_80gb")
CELL = make_cell("strategy=ulysses", "cluster.world_size=2", "seq_len=2k")
LIMITED = make_cell("strategy=ulysses", "cluster.world_size=2", "cluster.memory_limit_gib=1")


def record(cell, *, times=1.0, peak=1.0, status="ok"):
    """What a cell whose prediction is off by these factors would have left."""
    expected = predict(cell, HARDWARE, None)
    step_ms = expected.step_time_ms.expected * times
    return {
        "cell_id": cell.cell_id,
        "status": status,
        "timing": {"step_times_ms": [[step_ms / 2], [step_ms]]} if status == "ok" else None,
        "memory": {"peak_allocated_bytes": [0, expected.peak_allocated_bytes.expected * peak]},
    }


NOT_MEASURED = {"deepspeed_fpdt"}
"""Beside those whose packages are optional; the reference is older than they are."""


def score_of(cells, records):
    return Score.of(compared([cell.cell_id for cell in cells], cells, records, HARDWARE))


def test_an_error_is_that_of_the_median_process_and_its_slowest_rank():
    records = [record(CELL, times=times) for times in (1.25, 2, 1.0)]
    assert score_of([CELL], records).time_errors == pytest.approx([0.2])


def test_peak_memory_is_that_of_the_fullest_rank():
    assert score_of([CELL], [record(CELL, peak=0.8)]).memory_errors == pytest.approx([0.25])


@pytest.mark.parametrize(("status", "right"), [("ok", True), ("out_of_memory", False), ("error", False)])
def test_a_verdict_counts_where_memory_is_limited(status, right):
    assert score_of([LIMITED, CELL], [record(LIMITED, status=status), record(CELL)]).verdicts == (right,)


def test_what_is_undecided_is_not_right():
    (row,) = compared(["cell"], [LIMITED], [record(LIMITED)], HARDWARE)
    undecided = replace(row, predicted=replace(row.predicted, needed_bytes=Band(0, 1, 2**60)))
    assert undecided.predicted.fit is Fit.UNDECIDED
    assert undecided.is_verdict_right is False


def test_goals_that_are_missed_are_named():
    good, bad = score_of([CELL], [record(CELL)]), score_of([CELL], [record(CELL, times=1.2, peak=1.1)])
    assert good.missed() == []
    assert [line.split(" should")[0] for line in bad.missed()] == [
        "the median error of step time",
        "the median error of peak allocated",
    ]


def test_a_cell_that_failed_is_missed_even_once():
    records = [record(CELL), record(CELL, status="wrong_result")]
    (line,) = score_of([CELL], records).missed()
    assert line.endswith(f"({CELL.cell_id}: wrong_result)")


def test_the_table_shows_measured_predicted_and_error():
    rows = compared(["its words"], [CELL], [record(CELL, times=1.25)], HARDWARE)
    assert "-20.0%" in table(rows)[1]
    assert "its words" in table(rows)[1]
    assert "step time: median error 20.0%, worst 20.0%, 1 cells" in score_lines(Score.of(rows))


def test_all_strategies_are_among_the_listed_cells():
    strategies = {line.split()[0].removeprefix("strategy=") for line in command_lines(CELLS)}
    assert strategies == {name for name, facts in STRATEGIES.items() if not facts.is_optional} - NOT_MEASURED


def test_a_file_that_is_no_list_is_refused(tmp_path):
    (tmp_path / "cells.yaml").write_text("cells: [seq_len=1k]")
    with pytest.raises(ConfigError, match="must hold `common` words and a list of `cells`"):
        command_lines(tmp_path / "cells.yaml")
