"""Errors of predictions, cell by cell: what was predicted of a measured cell over what was measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from bench.cost.band import Fit
from bench.record import Provenance, Status

STEP_TIME, PEAK = "step_time_error_share", "peak_allocated_error_share"
STEP_TIME_IN_BAND = "step_time_in_band"
FIT_OUTCOME = "predicted_fit_outcome"
SCORED = (STEP_TIME, PEAK, FIT_OUTCOME)
"""A cell with a value in any of these has something measured and predicted."""
YES, NO = "yes", "no"
RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"
HAPPENED: Mapping[str, Fit] = {Status.OK: Fit.FITS, Status.OUT_OF_MEMORY: Fit.OUT_OF_MEMORY}
"""Statuses that answer whether there was room."""


def with_score(summary: pd.DataFrame) -> pd.DataFrame:
    """Add the errors of what was predicted of measured cells, over what was measured.

    Missing where nothing was predicted, or nothing measured. Cells of another provenance have none, and cells
    whose ranks share a GPU have none of the time.
    """
    measured = summary["provenance"].eq(Provenance.MEASURED)
    shares_gpu = summary["cluster.ranks_per_gpu"].astype("float64").gt(1)
    step_ms = summary["step_time_ms"].astype("float64").where(measured & ~shares_gpu)
    peak = summary["peak_allocated_bytes"].astype("float64").where(measured)
    low, high = summary["predicted_step_time_low_ms"], summary["predicted_step_time_high_ms"]
    is_inside = (low <= step_ms) & (step_ms <= high)
    in_band = pd.Series(np.where(is_inside, YES, NO), index=summary.index, dtype="object")
    return summary.assign(
        **{
            STEP_TIME: summary["predicted_step_time_ms"] / step_ms - 1,
            STEP_TIME_IN_BAND: in_band.where(low.notna() & step_ms.notna(), None),
            PEAK: summary["predicted_peak_allocated_bytes"] / peak - 1,
            FIT_OUTCOME: _fit_outcome(summary, measured),
        }
    )


def _fit_outcome(summary: pd.DataFrame, measured: pd.Series[bool]) -> pd.Series[str]:
    """Return whether the verdict on memory came true; `undecided` where it left that open."""
    said = summary["predicted_fit"].where(measured)
    happened = summary["status"].map(HAPPENED)
    outcome = np.where(said.eq(happened), RIGHT, WRONG)
    outcome = np.where(said.eq(Fit.UNDECIDED), UNDECIDED, outcome)
    known = said.notna() & happened.notna()
    return pd.Series(outcome, index=summary.index, dtype="object").where(known, None)
