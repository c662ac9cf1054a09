"""What was predicted set beside what was measured, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from bench.cost.band import Fit
from bench.record import Provenance, Status

STEP_TIME, PEAK = "step_time_error_share", "peak_allocated_error_share"
STEP_TIME_IN_BAND, PEAK_IN_BAND = "step_time_in_band", "peak_allocated_in_band"
FIT_OUTCOME = "predicted_fit_outcome"
SCORED = (STEP_TIME, PEAK, FIT_OUTCOME)
"""A cell with a value in any of these has something measured and predicted."""
YES, NO = "yes", "no"
RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"
HAPPENED: Mapping[str, Fit] = {Status.OK: Fit.FITS, Status.OUT_OF_MEMORY: Fit.OUT_OF_MEMORY}
"""Statuses that answer whether there was room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How near predictions of one quantity came, over all cells that have both."""

    name: str
    cells: int
    median_error: float
    """Of the errors' sizes, as parts of what was measured."""
    largest_error: float
    with_band: int
    """How many of the cells have a band of any width."""
    in_band: int
    """How many of those lie in it."""


def with_score(summary: pd.DataFrame) -> pd.DataFrame:
    """Adds the errors of what was predicted of measured cells, over what was measured.

    Missing where nothing was predicted, or nothing measured; cells of another provenance have none, and cells
    whose ranks take turns on a GPU have none of the time.
    """
    measured = summary["provenance"].eq(Provenance.MEASURED)
    takes_turns = summary["cluster.ranks_per_gpu"].astype("float64").gt(1)
    step_ms = summary["step_time_ms"].astype("float64").where(measured & ~takes_turns)
    peak = summary["peak_allocated_bytes"].astype("float64").where(measured)
    step_error, step_low, step_high = _errors(summary, "predicted_step_time{}_ms", step_ms)
    peak_error, peak_low, peak_high = _errors(summary, "predicted_peak_allocated{}_bytes", peak)
    return summary.assign(
        step_time_error_share=step_error,
        step_time_error_low_share=step_low,
        step_time_error_high_share=step_high,
        step_time_in_band=_is_between(step_low, step_high),
        tokens_per_s_error_share=summary["predicted_tokens_per_s"]
        / summary["tokens_per_s"].astype("float64").where(measured & ~takes_turns)
        - 1,
        peak_allocated_error_share=peak_error,
        peak_allocated_error_low_share=peak_low,
        peak_allocated_error_high_share=peak_high,
        peak_allocated_in_band=_is_between(peak_low, peak_high),
        predicted_fit_outcome=_fit_outcome(summary, measured),
    )


def scores(summary: pd.DataFrame) -> list[Score]:
    """One for step time and one for peak memory, where any cell has it predicted and measured."""
    columns = {"step time": (STEP_TIME, STEP_TIME_IN_BAND), "peak allocated": (PEAK, PEAK_IN_BAND)}
    found = []
    for name, (error, in_band) in columns.items():
        sizes = summary[error].dropna().abs()
        if len(sizes):
            found.append(
                Score(
                    name=name,
                    cells=len(sizes),
                    median_error=float(sizes.median()),
                    largest_error=float(sizes.max()),
                    with_band=int(summary[in_band].notna().sum()),
                    in_band=int(summary[in_band].eq(YES).sum()),
                )
            )
    return found


def _errors(summary: pd.DataFrame, column: str, measured: pd.Series[float]) -> Sequence[pd.Series[float]]:
    """Expected, low and high over what was measured, less 1."""
    return [summary[column.format(end)] / measured - 1 for end in ("", "_low", "_high")]


def _is_between(low: pd.Series[float], high: pd.Series[float]) -> pd.Series[str]:
    """Whether what was measured lies within the band, whose ends are errors; missing without any width."""
    inside = np.where((low <= 0) & (high >= 0), YES, NO)
    return _known(inside, low.notna() & low.ne(high))


def _fit_outcome(summary: pd.DataFrame, measured: pd.Series[bool]) -> pd.Series[str]:
    """Whether the verdict on memory came true; `undecided` where it left that open."""
    said = summary["predicted_fit"].where(measured)
    happened = summary["status"].map(HAPPENED)
    outcome = np.where(said.eq(happened), RIGHT, WRONG)
    outcome = np.where(said.eq(Fit.UNDECIDED), UNDECIDED, outcome)
    return _known(outcome, said.notna() & happened.notna())


def _known(texts: npt.NDArray[Any], known: pd.Series[bool]) -> pd.Series[str]:
    """The texts where they are known, else nothing."""
    return pd.Series(texts, index=known.index, dtype="object").where(known, None)
