"""Errors are those of predictions against measured cells, and a missed goal is said."""

from dataclasses import replace

import pytest

from bench.accuracy.__main__ import CELLS, listed_cells
from bench.accuracy.comparison import compared, missed, score_lines, table
from bench.config import ConfigError
from bench.cost.band import Band
from bench.cost.fit import Fit
from bench.cost.prediction import predict
from bench.request.hardware import hardware_of
from bench.strategies import STRATEGIES
from tests.cells import TWO_CORES, make_cell

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


def rows_of(*records, cell=CELL):
    return compared({cell.cell_id: cell}, records, HARDWARE)


def test_errors_are_those_of_the_median_process_its_slowest_rank_and_the_fullest_rank():
    (row,) = rows_of(*(record(CELL, times=times, peak=0.8) for times in (1.25, 2, 1.0)))
    assert (row.time_error, row.memory_error) == pytest.approx((-0.2, 0.25))
    assert "-20.0%" in table([row])[1]
    assert "step time: median error 20.0%, worst 20.0%, 1 cells" in score_lines([row])


@pytest.mark.parametrize(("status", "right"), [("ok", True), ("out_of_memory", False), ("error", False)])
def test_a_verdict_counts_where_memory_is_limited_and_what_is_undecided_is_not_right(status, right):
    (row,) = rows_of(record(LIMITED, status=status), cell=LIMITED)
    assert row.is_verdict_right is right
    undecided = replace(row, predicted=replace(row.predicted, needed_bytes=Band(0, 1, 2**60)))
    assert (undecided.predicted.fit, undecided.is_verdict_right) == (Fit.UNDECIDED, False)
    (unlimited,) = rows_of(record(CELL))
    assert unlimited.is_verdict_right is None


def test_goals_that_are_missed_are_named():
    assert missed(rows_of(record(CELL))) == []
    failed = rows_of(record(CELL, times=1.2, peak=1.1), record(CELL, status="wrong_result"))
    (wrong,) = rows_of(record(LIMITED, status="out_of_memory"), cell=LIMITED)
    assert [line.split(" should")[0] for line in missed([*failed, wrong])] == [
        "the median error of step time",
        "the median error of peak allocated",
        "every verdict on memory",
        "every cell",
    ]
    assert missed(failed)[-1].endswith(f"({CELL.cell_id}: wrong_result)")


def test_all_strategies_are_among_the_listed_cells():
    strategies = {cell.strategy for cell in listed_cells(CELLS, TWO_CORES).values()}
    assert strategies == {name for name, facts in STRATEGIES.items() if not facts.is_optional} - NOT_MEASURED


def test_a_file_that_is_no_list_is_refused(tmp_path):
    (tmp_path / "cells.yaml").write_text("cells: [seq_len=1k]")
    with pytest.raises(ConfigError, match="must hold `common` words and a list of `cells`"):
        listed_cells(tmp_path / "cells.yaml", TWO_CORES)
