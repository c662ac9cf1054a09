"""Warns about one record whose numbers are less reliable. A note never removes a step."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from analysis.labels import percent_label
from analysis.read.traced_shares import TracedShares
from bench.measure.parity.section import ParitySection
from bench.measure.telemetry.section import TelemetrySection
from bench.record.record import Record

MIN_STEPS = 6
"""Smallest number of steps for which quartiles are computed. A 95 % interval needs as many."""
UNSTABLE, VERY_UNSTABLE = 0.10, 0.25
"""Limits on interquartile range over median, those of torch.utils.benchmark."""
SEVERE_FENCE = 3.0
"""Distance of Tukey's outer fences from the quartiles, in interquartile ranges."""
BUSY = 2.0
"""Load average over cores above which other processes must be running next to the sweep."""
PURPOSES_UNKNOWN = "communication by purpose unknown: the traced step made other calls than the inspected one"


def note_of(record: Record, steps_ms: Sequence[float], shares: TracedShares | None) -> str | None:
    """Return all notes on a successful record, joined by `; `; None without any.

    Args:
        record: record with status `ok`.
        steps_ms: times of the record's timed steps.
        shares: communication shares of the record's traced steps; None without a trace.
    """
    untraced = record.trace and record.trace.failure
    notes = [
        "warmed up with shorter steps only" if record.timing and record.timing.warmup == "short" else None,
        void_note(shares) if shares else None,
        PURPOSES_UNKNOWN if record.trace and any(record.trace.purposes_unknown) else None,
        f"no communication shares: {untraced}" if untraced else None,
        _throttling_note(record.telemetry) if record.telemetry else None,
        load_note(record),
        _parity_note(record.parity) if record.parity else None,
        *step_notes(steps_ms),
    ]
    return "; ".join(filter(None, notes)) or None


def step_notes(steps_ms: Sequence[float]) -> list[str]:
    """Return notes on the spread of a cell's step times; empty where the steps are steady."""
    if len(steps_ms) < MIN_STEPS:
        return []
    ordered = sorted(steps_ms)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    spread, reach = (high - low) / median, SEVERE_FENCE * (high - low)
    severe = len(ordered) - bisect_right(ordered, high + reach) + bisect_left(ordered, low - reach)
    notes = []
    if spread > UNSTABLE:
        degree = "very unstable" if spread > VERY_UNSTABLE else "unstable"
        notes.append(
            f"{degree}: the interquartile range of its steps is {percent_label(spread)} of the median"
        )
    if severe:
        notes.append(f"{severe} of {len(steps_ms)} steps are severe outliers, kept")
    return notes


def load_note(record: Record) -> str | None:
    """Return a note on other work on the machine at the start of the timed steps; None without any."""
    load = record.telemetry.load_average if record.telemetry else None
    cores = record.environment.cores
    if load is None or not cores or load <= BUSY * cores:
        return None
    return f"the machine was busy: load average {load:.1f} on {cores} cores"


def void_note(shares: TracedShares) -> str | None:
    """Return a note on the traced steps that are left out, with their ratios; None without any."""
    void = len(shares.void_ratios)
    if not void:
        return None
    took = f"took {_range_text(shares.void_ratios)} times the timed step"
    if shares.steps:
        return f"{void} of {len(shares.ratios)} traced steps are left out: they {took}"
    steps = "the traced step" if void == 1 else f"all {void} traced steps"
    return f"communication share excluded: {steps} {took}"


def _range_text(ratios: Sequence[float]) -> str:
    """Return `1.31`, or `0.62 to 1.40` of different ratios."""
    ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return " to ".join(ends)


def _throttling_note(telemetry: TelemetrySection) -> str | None:
    """Return the reasons why a device was throttled during the timed steps; None where none was."""
    if not telemetry.throttled:
        return None
    reasons = dict.fromkeys(name for events in telemetry.clock_events or () for name in events)
    return f"throttled while timed ({', '.join(reasons) or 'low clock'})"


def _parity_note(parity: ParitySection) -> str | None:
    return f"attention not compared with float64: {parity.reason}" if parity.reason else None
