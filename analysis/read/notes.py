"""What a reader must know of one record before trusting its numbers: never a reason to drop a step."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from analysis.labels import percent_label
from analysis.read.traced_shares import TracedShares
from bench.measure.parity.section import ParitySection
from bench.measure.telemetry.section import TelemetrySection
from bench.measure.trace.section import TraceSection
from bench.record.record import Record

MIN_STEPS = 6
"""As for an interval: quartiles of fewer steps say nothing."""
UNSTABLE, VERY_UNSTABLE = 0.10, 0.25
"""Interquartile range over median, as torch.utils.benchmark has it."""
SEVERE_FENCE = 3.0
"""Tukey's outer fences stand this many interquartile ranges outside the quartiles."""
BUSY = 2.0
"""A load average of so many times the cores is more than a sweep makes by itself."""
UNJOINED = "communication by purpose unknown: the traced step made other calls than the inspected one"
OTHER_CALLS = "a traced step made other calls than the inspected one"


def note_of(record: Record, steps_ms: Sequence[float], shares: TracedShares | None) -> str | None:
    """All notes on a record that worked. `steps_ms` are sorted; `shares` are those of its traced steps."""
    untraced = record.trace and record.trace.failure
    notes = [
        "warmed up with shorter steps only" if record.timing and record.timing.warmup == "short" else None,
        void_note(shares) if shares else None,
        _other_calls(record.trace) if record.trace else None,
        f"no communication shares: {untraced}" if untraced else None,
        _throttling(record.telemetry) if record.telemetry else None,
        load_note(record),
        _uncompared(record.parity) if record.parity else None,
        *step_notes(steps_ms),
    ]
    return "; ".join(filter(None, notes)) or None


def step_notes(steps_ms: Sequence[float]) -> list[str]:
    """What a reader must know of the spread of a cell's steps; empty where they are steady."""
    if len(steps_ms) < MIN_STEPS:
        return []
    ordered = sorted(steps_ms)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    spread, reach = (high - low) / median, SEVERE_FENCE * (high - low)
    severe = len(ordered) - bisect_right(ordered, high + reach) + bisect_left(ordered, low - reach)
    notes = []
    if spread > UNSTABLE:
        how = "very unstable" if spread > VERY_UNSTABLE else "unstable"
        notes.append(
            f"{how}: the middle half of its steps spreads over {percent_label(spread)} of the median"
        )
    if severe:
        notes.append(f"{severe} of {len(steps_ms)} steps are severe outliers, kept")
    return notes


def load_note(record: Record) -> str | None:
    """That the machine had other work at the window's start, where its load says so."""
    load = record.telemetry.load_average if record.telemetry else None
    cores = record.environment.cores
    if load is None or not cores or load <= BUSY * cores:
        return None
    return f"the machine was busy: load average {load:.1f} on {cores} cores"


def void_note(shares: TracedShares) -> str | None:
    """How many traced steps are left out, and by how much they missed the timed step; None where none is."""
    void = len(shares.void_ratios)
    if not void:
        return None
    took = f"took {_times(shares.void_ratios)} times the timed step"
    if shares.steps:
        return f"{void} of {len(shares.ratios)} traced steps are left out: they {took}"
    which = "the traced step" if void == 1 else f"all {void} traced steps"
    return f"communication share excluded: {which} {took}"


def _times(ratios: Sequence[float]) -> str:
    """`1.31`, or `0.62 to 1.40` of several."""
    ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return " to ".join(ends)


def _other_calls(trace: TraceSection) -> str | None:
    """Said whether or not the shares are void: it is about what ran, not about how long it took."""
    if any(trace.purposes_unknown):
        return UNJOINED
    return OTHER_CALLS if any(any(step.call_differences) for step in trace.steps) else None


def _throttling(telemetry: TelemetrySection) -> str | None:
    """What held a device back while the clock ran, if anything did."""
    if not telemetry.throttled:
        return None
    seen = dict.fromkeys(name for events in telemetry.clock_events or () for name in events)
    return f"throttled while timed ({', '.join(seen) or 'low clock'})"


def _uncompared(parity: ParitySection) -> str | None:
    return f"attention not compared with float64: {parity.reason}" if parity.reason else None
