"""The sections with a row for each cell: all of them, those of attention alone, and those predicted."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.answers.provenance import prediction_lines
from analysis.cells.prediction_errors import FIT_OUTCOME, PREDICTION_COLUMNS
from analysis.read.metrics import text_of
from analysis.show.columns import (
    LENGTH,
    RANKS,
    STRATEGY,
    CellRow,
    is_replayed,
    predicted_band,
)
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table

ATTENTION_READING = (
    "One call, no model around it; times are medians of the slowest rank. Of one device / ranks: the same"
    " kernel on one device, divided by the ranks that share a sequence, over this call. Ulps: units in the"
    " last place of the dtype at a row's maximum, the largest of some sampled tokens."
)
PREDICTION_READING = (
    "Predicted before the run by the cost model, with its band in brackets, which is no confidence interval."
    " Error: predicted over measured, less 1. Memory verdict: whether there is room, and whether that came"
    " true."
)
FIT_LABELS: Mapping[str, str] = {"fits": "fits", "undecided": "undecided", "out_of_memory": "runs out"}


def cells(findings: Findings) -> Section:
    """Return the table of cells, of too many those that were started last."""
    lines = [findings.shown.note] if findings.shown.note else []
    if not findings.shown_rows:
        lines = ["No records yet."]
    return Section(
        "Cells", lines, findings.cell_table, prints_lines=True, prints_table=True, has_own_form=True
    )


def attention(findings: Findings) -> Section | None:
    """Return the cells that are about attention alone."""
    rows = [cell for cell in findings.shown_rows if pd.notna(cell["attention_forward_ms"])]
    if not rows:
        return None
    table = Table.of(ATTENTION_COLUMNS, rows)
    return Section("Attention alone", (), table, ATTENTION_READING, prints_table=True)


def predictions(findings: Findings) -> Section | None:
    """Return what was predicted of measured cells next to what was measured."""
    rows = [cell for cell in findings.shown_rows if any(pd.notna(cell[key]) for key in PREDICTION_COLUMNS)]
    if not rows:
        return None
    lines, table = prediction_lines(findings.cells), Table.of(PREDICTION_TABLE, rows)
    return Section("Predicted next to measured", lines, table, PREDICTION_READING, prints_lines=True)


def _of_single(cell: CellRow) -> str:
    """Return the attention of one device over this call, an upper bound for a replay without a link."""
    text = text_of(cell, "attention_of_one_device")
    return f"at most {text}" if text and is_replayed(cell) else text


def _fit(cell: CellRow) -> str:
    """Return `fits: right`; empty where nothing was predicted, or nothing answers it."""
    outcome = cell[FIT_OUTCOME]
    if pd.isna(outcome):
        return ""
    label = FIT_LABELS[cell["predicted_fit"]]
    return label if label == outcome else f"{label}: {outcome}"


def _metric(name: str, heading: str, short: str | None = None) -> Column:
    return Column(heading, lambda cell: text_of(cell, name), short, sorted_by=name)


def _error(tensor: str) -> Column:
    """Return a column with an error and that of the kernel alone: `1.2 (1.1)`."""
    name = f"{tensor}_error_ulps"

    def text(cell: CellRow) -> str:
        error, control = text_of(cell, name), text_of(cell, f"control_{name}")
        return f"{error} ({control})" if control else error

    return Column(f"{tensor}, ulps (kernel alone)", text, f"{tensor} ulps", sorted_by=name)


def _predicted(heading: str, column: str) -> Column:
    name = f"predicted_{column.format('')}"
    return Column(heading, lambda cell: predicted_band(cell, column), sorted_by=name)


ATTENTION_COLUMNS = (
    STRATEGY,
    LENGTH,
    RANKS,
    _metric("attention_forward_ms", "forward (ms)", "fwd ms"),
    _metric("attention_backward_ms", "backward (ms)", "bwd ms"),
    _metric("attention_flops_per_s", "TFLOP/s"),
    Column("of one device / ranks", _of_single, "of 1/P", sorted_by="attention_of_one_device"),
    _error("out"),
    _error("dq"),
)
PREDICTION_TABLE = (
    STRATEGY,
    LENGTH,
    RANKS,
    _metric("step_time_ms", "step time (ms)"),
    _predicted("predicted", "step_time{}_ms"),
    _metric("step_time_error_share", "error"),
    _metric("step_time_in_band", "in the band"),
    _metric("peak_allocated_bytes", "peak allocated"),
    _predicted("predicted", "peak_allocated{}_bytes"),
    _metric("peak_allocated_error_share", "error"),
    Column("memory verdict", _fit, sorted_by=FIT_OUTCOME),
)
