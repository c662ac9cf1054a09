"""Sections with one row per cell: all cells, cells of attention alone, and predicted next to measured."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.answers.provenance import prediction_lines
from analysis.cells.prediction_errors import FIT_OUTCOME, PREDICTION_COLUMNS
from analysis.read.metrics import metric_text
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
    "Each row is one attention call without a model; times are medians of the slowest rank. Efficiency: time"
    " of the same kernel on one device, divided by the number of ranks that share a sequence, over the time"
    " of this call. Ulps: largest error against float64 among sampled tokens, in units in the last place of"
    " the dtype at the row's maximum; in brackets, the kernel alone on one device."
)
PREDICTION_READING = (
    "Predicted: value of the cost model before the run, with its band in brackets; the band is not a"
    " confidence interval. Error: predicted over measured, minus 1. Memory verdict: whether the cell was"
    " predicted to fit in memory, and whether that was right."
)
FIT_LABELS: Mapping[str, str] = {"fits": "fits", "undecided": "undecided", "out_of_memory": "runs out"}


def cells_section(findings: Findings) -> Section:
    """Return the table of cells; if there are too many, of the cells that started last."""
    lines = [findings.shown.note] if findings.shown.note else []
    if not findings.shown_rows:
        lines = ["No records yet."]
    return Section(
        "Cells", lines, findings.cell_table, prints_lines=True, prints_table=True, has_own_form=True
    )


def attention_section(findings: Findings) -> Section | None:
    """Return the table of the cells that run attention alone."""
    rows = [cell for cell in findings.shown_rows if pd.notna(cell["attention_forward_ms"])]
    if not rows:
        return None
    table = Table.from_items(ATTENTION_COLUMNS, rows)
    return Section("Attention alone", (), table, ATTENTION_READING, prints_table=True)


def predictions_section(findings: Findings) -> Section | None:
    """Return the table of predicted and measured values of measured cells."""
    rows = [cell for cell in findings.shown_rows if any(pd.notna(cell[key]) for key in PREDICTION_COLUMNS)]
    if not rows:
        return None
    lines, table = prediction_lines(findings.cells), Table.from_items(PREDICTED_COLUMNS, rows)
    return Section("Predicted next to measured", lines, table, PREDICTION_READING, prints_lines=True)


def _efficiency_text(cell: CellRow) -> str:
    """Return the parallel efficiency of attention; for a replay, which has no link, an upper bound."""
    text = metric_text(cell, "attention_of_one_device")
    return f"at most {text}" if text and is_replayed(cell) else text


def _fit_text(cell: CellRow) -> str:
    """Return `fits: right`; empty if nothing was predicted or the run did not show whether it fits."""
    outcome = cell[FIT_OUTCOME]
    if pd.isna(outcome):
        return ""
    label = FIT_LABELS[cell["predicted_fit"]]
    return label if label == outcome else f"{label}: {outcome}"


def _metric_column(name: str, heading: str, short: str | None = None) -> Column:
    return Column(heading, lambda cell: metric_text(cell, name), short, sorted_by=name)


def _error_column(tensor: str) -> Column:
    """Return a column with the error of a tensor and the error of the kernel alone: `1.2 (1.1)`."""
    name = f"{tensor}_error_ulps"

    def text(cell: CellRow) -> str:
        error, control = metric_text(cell, name), metric_text(cell, f"control_{name}")
        return f"{error} ({control})" if control else error

    return Column(f"{tensor}, ulps (kernel alone)", text, f"{tensor} ulps", sorted_by=name)


def _predicted_column(heading: str, column: str) -> Column:
    name = f"predicted_{column.format('')}"
    return Column(heading, lambda cell: predicted_band(cell, column), sorted_by=name)


ATTENTION_COLUMNS = (
    STRATEGY,
    LENGTH,
    RANKS,
    _metric_column("attention_forward_ms", "forward (ms)", "fwd ms"),
    _metric_column("attention_backward_ms", "backward (ms)", "bwd ms"),
    _metric_column("attention_flops_per_s", "TFLOP/s"),
    Column("parallel efficiency", _efficiency_text, "efficiency", sorted_by="attention_of_one_device"),
    _error_column("out"),
    _error_column("dq"),
)
PREDICTED_COLUMNS = (
    STRATEGY,
    LENGTH,
    RANKS,
    _metric_column("step_time_ms", "step time (ms)"),
    _predicted_column("predicted", "step_time{}_ms"),
    _metric_column("step_time_error_share", "error"),
    _metric_column("step_time_in_band", "in the band"),
    _metric_column("peak_allocated_bytes", "peak allocated"),
    _predicted_column("predicted", "peak_allocated{}_bytes"),
    _metric_column("peak_allocated_error_share", "error"),
    Column("memory verdict", _fit_text, sorted_by=FIT_OUTCOME),
)
