"""Adds the errors of predictions: the predicted value of a measured cell relative to the measured value."""

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
"""Columns of which at least one has a value for every cell that was both predicted and measured."""
YES, NO = "yes", "no"
RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"
FIT_OF_STATUS: Mapping[str, Fit] = {Status.OK: Fit.FITS, Status.OUT_OF_MEMORY: Fit.OUT_OF_MEMORY}
"""Statuses that show whether a cell fits in memory."""
IGNORED = frozenset({"mode", "cluster", "seed"})
IGNORED_PREFIXES = ("measure.", "env.", "replay.", "data.", "cluster.")
NOT_IGNORED = frozenset(
    {"cluster.world_size", "cluster.nodes", "cluster.ranks_per_gpu", "cluster.memory_limit_gib"}
)
"""Settings of `cluster` in which a predicted and a measured cell must agree; IGNORED ones may differ."""


def with_predictions(summary: pd.DataFrame) -> pd.DataFrame:
    """Copy the predictions of predicted cells to measured and replayed cells with the same settings.

    Cells without a matching predicted cell stay without a prediction.
    """
    settings = [
        key
        for key in config_columns(summary)
        if key in NOT_IGNORED or (key not in IGNORED and not key.startswith(IGNORED_PREFIXES))
    ]
    columns = [str(key) for key in summary if str(key).startswith("predicted_")]
    is_predicted = summary["provenance"].eq(Provenance.PREDICTED)
    if not is_predicted.any() or is_predicted.all():
        return summary
    predictions = summary.loc[is_predicted, [*settings, *columns]].drop_duplicates(settings)
    matches = summary[settings].merge(predictions, how="left", on=settings).set_index(summary.index)
    return summary.assign(**{key: summary[key].where(summary[key].notna(), matches[key]) for key in columns})


def with_prediction_errors(summary: pd.DataFrame) -> pd.DataFrame:
    """Add the relative errors of the predictions of cells that ran.

    An error is missing where nothing was predicted or nothing was measured. Replayed cells and cells whose
    ranks share a GPU have no error of the step time.
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
    """Return whether each prediction of whether a cell fits in memory was `right`, `wrong` or `undecided`.

    None where nothing was predicted, or where the run does not show whether the cell fits.
    """
    predicted = summary["predicted_fit"].where(measured)
    observed = summary["status"].map(FIT_OF_STATUS)
    outcome = np.where(predicted.eq(observed), RIGHT, WRONG)
    outcome = np.where(predicted.eq(Fit.UNDECIDED), UNDECIDED, outcome)
    known = predicted.notna() & observed.notna()
    return pd.Series(outcome, index=summary.index, dtype="object").where(known, None)
