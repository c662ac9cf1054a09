"""What was predicted of one record's cell, made ready for its metrics: of a measured record too."""

from __future__ import annotations

from msgspec import Struct

from analysis.metrics.recorded import Band, Recorded


class Predicted(Struct, frozen=True, kw_only=True):
    """One step of a cell by the cost model, each figure with its band."""

    step_time_ms: Band
    tokens_per_s: Band
    peak_allocated_bytes: Band
    needed_bytes: Band
    fit: str | None
    """None where it is not known what a rank may take."""


def predicted(record: Recorded) -> Predicted | None:
    """The prediction that a record carries, whatever became of it; None where it carries none."""
    analytic = record.analytic
    if analytic is None or analytic.prediction is None or analytic.tokens_per_step is None:
        return None
    found = analytic.prediction
    return Predicted(
        step_time_ms=found.step_time_ms,
        tokens_per_s=rates_of(analytic.tokens_per_step, found.step_time_ms),
        peak_allocated_bytes=found.peak_allocated_bytes,
        needed_bytes=found.needed_bytes,
        fit=found.fit,
    )


def rates_of(tokens: int, step_time_ms: Band) -> Band:
    """Tokens per second by a step's time: the longest step has the fewest."""
    low, expected, high = (
        tokens / time_ms * 1e3 for time_ms in (step_time_ms.high, step_time_ms.expected, step_time_ms.low)
    )
    return Band(low, expected, high)
