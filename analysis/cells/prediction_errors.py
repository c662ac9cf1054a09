"""Errors of predictions, cell by cell: what was predicted of a measured cell over what was measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.read.frame import config_columns
from bench.cost.band import Fit
from bench.record.record import Provenance, Status

STEP_TIME, PEAK = "step_time_error_share", "peak_allocated_error_share"
STEP_TIME_IN_BAND = "step_time_in_band"
FIT_OUTCOME = "predicted_fit_outcome"
PREDICTION_COLUMNS = (STEP_TIME, PEAK, FIT_OUTCOME)
"""A cell with a value in any of these has something measured and predicted."""
YES, NO = "yes", "no"
RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"
HAPPENED: Mapping[str, Fit] = {Status.OK: Fit.FITS, Status.OUT_OF_MEMORY: Fit.OUT_OF_MEMORY}
"""Statuses that answer whether there was room."""
FREE = frozenset({"mode", "cluster", "seed"})
FREE_GROUPS = ("measure.", "env.", "replay.", "data.", "cluster.")
COUNTED = frozenset(
    {"cluster.world_size", "cluster.nodes", "cluster.ranks_per_gpu", "cluster.memory_limit_gib"}
)
"""Settings that a predicted and a measured cell may differ in, and those of `cluster` that they may not."""


def with_predictions(summary: pd.DataFrame) -> pd.DataFrame:
    """Give each measured or replayed cell what a predicted cell of the same settings says of it.

    Missing where the summary has no such cell: nothing is predicted afterwards.
    """
    settings = [
        key
        for key in config_columns(summary)
        if key in COUNTED or (key not in FREE and not key.startswith(FREE_GROUPS))
    ]
    columns = [str(key) for key in summary if str(key).startswith("predicted_")]
    is_predicted = summary["provenance"].eq(Provenance.PREDICTED)
    if not is_predicted.any() or is_predicted.all():
        return summary
    predictions = summary.loc[is_predicted, [*settings, *columns]].drop_duplicates(settings)
    found = summary[settings].merge(predictions, how="left", on=settings).set_index(summary.index)
    return summary.assign(**{key: summary[key].where(summary[key].notna(), found[key]) for key in columns})


def with_prediction_errors(summary: pd.DataFrame) -> pd.DataFrame:
    """Add the errors of what was predicted of cells that ran, over what was measured.

    Missing where nothing was predicted, or nothing measured. Replayed cells and cells whose ranks share a GPU
    have no error of the time.
    """
    summary = with_predictions(summary)
    measured = summary["provenance"].eq(Provenance.MEASURED)
    ran = measured | summary["provenance"].eq(Provenance.REPLAYED)
    shares_gpu = summary["cluster.ranks_per_gpu"].astype("float64").gt(1)
    step_ms = summary["step_time_ms"].astype("float64").where(measured & ~shares_gpu)
    peak = summary["peak_allocated_bytes"].astype("float64").where(ran)
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
