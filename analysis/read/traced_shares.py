"""What communication took of traced steps: transfer first, waiting beside it.

Exposed communication is cut in two by the arrival of the last of the ranks that had to meet. Before it a rank
waits, for work that others still do; after it data moves. Only the latter is the exchange's own.

Ranks are reduced by adding up: what all of them spent over what their steps took together. No rank is picked,
least of all the one that waits, and waiting is taken off on each rank before anything is added.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from analysis.read.recorded import Trace, TracedStep

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
    exchange: PurposeShares | None
    """Of attention; None where every step is left out, or waiting is not known."""
    communication: PurposeShares | None
    """For all purposes."""

    @property
    def void_steps(self) -> int:
        return len(self.void_ratios)


def is_void(ratio: float) -> bool:
    """Whether a step that took so many timed ones is left out."""
    return not MIN_TRACED_TO_TIMED <= ratio <= MAX_TRACED_TO_TIMED


def traced_shares(trace: Trace, timed_ms: float | None) -> TracedShares:
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
        exchange=_shares(kept, lambda by_purpose: sum(by_purpose.get("attention", ()))),
        communication=_shares(kept, lambda by_purpose: sum(map(sum, by_purpose.values()))),
    )


def expected_shares(trace: Trace, purpose: str | None = None) -> PurposeShares | None:
    """Transfer in the one step of a prediction, for a purpose or for all; waiting is not predicted.

    None where a record does not tell purposes apart.
    """
    exposed_ms = trace.purpose_exposed_ms
    if exposed_ms is None:
        return None
    names = exposed_ms if purpose is None else [purpose]
    spent_ms = sum(sum(exposed_ms.get(name, ())) for name in names)
    return PurposeShares(transfer=Spread(spent_ms / sum(trace.step_ms)), waiting=Spread(None))


def _shares(
    steps: Sequence[TracedStep], all_ranks_ms: Callable[[Mapping[str, Sequence[float]]], float]
) -> PurposeShares | None:
    transfer, waiting = [], []
    for step in steps:
        if step.purpose_exposed_waiting_ms is None:
            continue
        whole_ms, waited_ms = sum(step.step_ms), all_ranks_ms(step.purpose_exposed_waiting_ms)
        transfer.append((all_ranks_ms(step.purpose_exposed_ms) - waited_ms) / whole_ms)
        waiting.append(waited_ms / whole_ms)
    if not transfer:
        return None
    return PurposeShares(transfer=_spread(transfer), waiting=_spread(waiting))


def _spread(shares: Sequence[float]) -> Spread:
    return Spread(statistics.median(shares), min(shares), max(shares))
