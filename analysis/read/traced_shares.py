"""Computes the shares of traced steps that transfer and waiting took.

The arrival of the last rank at a collective splits exposed communication in two. Before it a rank waits for
work that other ranks still do; after it data moves. Only the latter is transfer, the cost of communication
itself.

A share is the sum of all ranks' times over the sum of all ranks' steps, so that it does not depend on which
rank waits. Waiting is subtracted on each rank before the sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from bench.measure.trace.section import TracedStep, TraceSection

MIN_TRACED_TO_TIMED, MAX_TRACED_TO_TIMED = 0.8, 1.2
"""Limits on a traced step over the median timed step. A longer step was slowed by the profiler or another
process, and a shorter step did not do the same work, so neither describes the timed steps."""


class Spread(NamedTuple):
    """Median, lowest and highest share of several steps, fractions of 0..1; None where unknown.

    A predicted step has no spread.
    """

    median: float | None
    low: float | None = None
    high: float | None = None


class PurposeShares(Struct, frozen=True, kw_only=True):
    """Exposed communication for some purposes, as shares of the traced steps."""

    transfer: Spread
    waiting: Spread


class TracedShares(Struct, frozen=True, kw_only=True):
    """Shares of a record's traced steps, without the void steps."""

    ratios: list[float]
    """Time of each traced step's slowest rank over the median timed step; empty where nothing was timed."""
    void_ratios: list[float]
    """Ratios of the void steps, which are left out."""
    steps: int
    """Number of steps that are not left out."""
    attention: PurposeShares | None
    """Attention communication; None where every step is left out, or waiting is unknown."""
    communication: PurposeShares | None
    """Communication for all purposes."""


def is_void(ratio: float) -> bool:
    """Return whether a step with this ratio to the median timed step is left out."""
    return not MIN_TRACED_TO_TIMED <= ratio <= MAX_TRACED_TO_TIMED


def traced_shares(trace: TraceSection, timed_ms: float | None) -> TracedShares:
    """Return the shares of the traced steps that are not void.

    `timed_ms` is the median timed step. Without one (None) no step is void.
    """
    steps = trace.steps
    ratios = [max(step.step_ms) / timed_ms for step in steps] if timed_ms is not None else []
    valid = (
        [step for step, ratio in zip(steps, ratios, strict=True) if not is_void(ratio)] if ratios else steps
    )
    return TracedShares(
        ratios=ratios,
        void_ratios=[*filter(is_void, ratios)],
        steps=len(valid),
        attention=_purpose_shares(valid, ["attention"]),
        communication=_purpose_shares(valid),
    )


def expected_shares(trace: TraceSection, purpose: str | None = None) -> PurposeShares:
    """Return the share of transfer in a predicted step, for one or all purposes; waiting is not predicted."""
    exposed_ms = trace.purpose_exposed_ms
    names = exposed_ms if purpose is None else [purpose]
    spent_ms = sum(sum(exposed_ms.get(name, ())) for name in names)
    return PurposeShares(transfer=Spread(spent_ms / sum(trace.step_ms)), waiting=Spread(None))


def transfer_ms(step: TracedStep, purpose: str) -> list[float] | None:
    """Return each rank's exposed communication less waiting, for one purpose; None if waiting is unknown."""
    if step.purpose_exposed_waiting_ms is None:
        return None
    nothing = [0.0] * len(step.step_ms)
    exposed_ms = step.purpose_exposed_ms.get(purpose, nothing)
    waiting_ms = step.purpose_exposed_waiting_ms.get(purpose, nothing)
    return [exposed - waiting for exposed, waiting in zip(exposed_ms, waiting_ms, strict=True)]


def _purpose_shares(
    steps: Sequence[TracedStep], purposes: Sequence[str] | None = None
) -> PurposeShares | None:
    """Return the shares of some or all purposes; None where waiting is unknown in every step."""
    transfer, waiting = [], []
    for step in steps:
        waiting_ms = step.purpose_exposed_waiting_ms
        if waiting_ms is None:
            continue
        names, whole_ms = purposes or [*step.purpose_exposed_ms], sum(step.step_ms)
        transfer.append(sum(sum(transfer_ms(step, name) or ()) for name in names) / whole_ms)
        waiting.append(sum(sum(waiting_ms.get(name, ())) for name in names) / whole_ms)
    if not transfer:
        return None
    return PurposeShares(transfer=_spread(transfer), waiting=_spread(waiting))


def _spread(shares: Sequence[float]) -> Spread:
    return Spread(statistics.median(shares), min(shares), max(shares))
