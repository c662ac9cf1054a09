"""What communication took of traced steps: transfer first, waiting beside it.

Exposed communication is cut in two by the arrival of the last of the ranks that had to meet. Before it a rank
waits, for work that others still do; after it data moves. Only the latter is the exchange's own.

Ranks are reduced by adding up: what all of them spent over what their steps took together. No rank is picked,
least of all the one that waits, and waiting is taken off on each rank before anything is added.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from bench.measure.trace.section import TracedStep, TraceSection

MIN_TRACED_TO_TIMED, MAX_TRACED_TO_TIMED = 0.8, 1.2
"""A traced step outside of these, in timed ones, does not describe them: above, the profiler or a neighbour
slowed it; below, it did not do what they did."""


class Spread(NamedTuple):
    """A figure of several steps: fractions 0..1. None is what is not known: no spread of an expected step."""

    median: float | None
    low: float | None = None
    high: float | None = None


class PurposeShares(Struct, frozen=True, kw_only=True):
    """Exposed communication for some purposes, of the traced steps."""

    transfer: Spread
    waiting: Spread


class TracedShares(Struct, frozen=True, kw_only=True):
    """The traced steps of a record, and what is said of those that are not void."""

    ratios: list[float]
    """Per step what its slowest rank took, in median timed steps; empty where nothing was timed."""
    void_ratios: list[float]
    """Those of the steps that are left out."""
    steps: int
    """How many are not left out."""
    attention: PurposeShares | None
    """Communication of attention; None where every step is left out, or waiting is not known."""
    communication: PurposeShares | None
    """Communication for all purposes."""


def is_void(ratio: float) -> bool:
    """Whether a step that took so many timed ones is left out."""
    return not MIN_TRACED_TO_TIMED <= ratio <= MAX_TRACED_TO_TIMED


def traced_shares(trace: TraceSection, timed_ms: float | None) -> TracedShares:
    """The shares of all traced steps; `timed_ms` is the median timed step, None where there is none."""
    steps = trace.steps
    ratios = [max(step.step_ms) / timed_ms for step in steps] if timed_ms is not None else []
    kept = (
        [step for step, ratio in zip(steps, ratios, strict=True) if not is_void(ratio)] if ratios else steps
    )
    return TracedShares(
        ratios=ratios,
        void_ratios=[*filter(is_void, ratios)],
        steps=len(kept),
        attention=_shares(kept, ["attention"]),
        communication=_shares(kept),
    )


def expected_shares(trace: TraceSection, purpose: str | None = None) -> PurposeShares:
    """Transfer in the one step of a prediction, for a purpose or for all; waiting is not predicted."""
    exposed_ms = trace.purpose_exposed_ms
    names = exposed_ms if purpose is None else [purpose]
    spent_ms = sum(sum(exposed_ms.get(name, ())) for name in names)
    return PurposeShares(transfer=Spread(spent_ms / sum(trace.step_ms)), waiting=Spread(None))


def transfer_ms(step: TracedStep, purpose: str) -> list[float] | None:
    """Return exposed communication less waiting for one purpose, by rank; None where waiting is not known."""
    if step.purpose_exposed_waiting_ms is None:
        return None
    nothing = [0.0] * len(step.step_ms)
    exposed_ms = step.purpose_exposed_ms.get(purpose, nothing)
    waiting_ms = step.purpose_exposed_waiting_ms.get(purpose, nothing)
    return [exposed - waiting for exposed, waiting in zip(exposed_ms, waiting_ms, strict=True)]


def _shares(steps: Sequence[TracedStep], purposes: Sequence[str] | None = None) -> PurposeShares | None:
    """Return the shares of these purposes, or of all; None where no step has a known waiting."""
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
