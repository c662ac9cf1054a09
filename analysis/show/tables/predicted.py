"""Predicted next to measured values, as rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.prediction_errors import FIT_OUTCOME, PREDICTION_COLUMNS
from analysis.read.metrics import text_of
from analysis.show.tables.rows import predicted_band
from bench.common.labels import length_label

HEADINGS = (
    "strategy", "length", "ranks/sp", "step time (ms)", "predicted", "error", "in the band",
    "peak allocated", "predicted", "error", "memory verdict",
)  # fmt: skip
COLUMNS = (
    "strategy", "seq_len", "cluster.world_size", "step_time_ms", "predicted_step_time_ms",
    "step_time_error_share", "step_time_in_band", "peak_allocated_bytes", "predicted_peak_allocated_bytes",
    "peak_allocated_error_share", FIT_OUTCOME,
)  # fmt: skip
"""The summary's column behind each of HEADINGS."""
READING = (
    "Predicted before the run by the cost model, with its band in brackets, which is no confidence interval."
    " Error: predicted over measured, less 1. Memory verdict: whether there is room, and whether that came"
    " true."
)
BANDS: Mapping[str, str] = {
    "predicted_step_time_ms": "step_time{}_ms",
    "predicted_peak_allocated_bytes": "peak_allocated{}_bytes",
}
"""The columns that are shown with their bands."""
SAID: Mapping[str, str] = {"fits": "fits", "undecided": "undecided", "out_of_memory": "runs out"}


def prediction_rows(cells: Cells) -> list[tuple[str, ...]]:
    """The measured cells of which something was predicted, in the order of HEADINGS."""
    scored = cells.frame[cells.frame[[*PREDICTION_COLUMNS]].notna().any(axis=1)]
    names = cells.names[scored.index]
    return [_row(cell, name) for cell, name in zip(cells.rows_of(scored), names, strict=True)]


def _row(cell: Mapping[Any, Any], name: str) -> tuple[str, ...]:
    figures = (
        predicted_band(cell, BANDS[column]) if column in BANDS else text_of(cell, column)
        for column in COLUMNS[3:-1]
    )
    ranks = f"{cell['cluster.world_size']}/{cell['sp_degree']}"
    return (name, length_label(int(cell["seq_len"])), ranks, *figures, _verdict(cell))


def _verdict(cell: Mapping[Any, Any]) -> str:
    """`fits: right`; empty where nothing was said, or nothing answers it."""
    outcome = cell[FIT_OUTCOME]
    if pd.isna(outcome):
        return ""
    said = SAID[cell["predicted_fit"]]
    return said if said == outcome else f"{said}: {outcome}"
