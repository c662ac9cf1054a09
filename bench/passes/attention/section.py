"""Attention alone, call by call: the pass of `workload=attention` without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.config import RunConfig
from bench.passes.facts import NOT_RUN, PassFacts, RankReport, by_rank
from bench.record import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDevice:
    """Calls of rank 0 alone on whole sequences while the others wait; null on the others."""

    single_forward_ms: list[float] | None = None
    single_backward_ms: list[float] | None = None
    control_error_ulps: dict[str, float] | None = None
    """The kernel's own error in this dtype."""
    single_reason: str | None = None
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """One rank's calls."""

    forward_ms: list[float]
    backward_ms: list[float]
    error_rows: int
    error_ulps: dict[str, float]
    """Of `out` and `dq`; of `dk` and `dv` only where they are not finite."""
    single: SingleDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCalls:
    """Attention alone; a step of `timing` is one call, forward and backward."""

    forward_ms: list[list[float]]
    """By rank and timed call."""
    backward_ms: list[list[float]]
    single_forward_ms: list[float] | None
    """By call, of the same kernel on whole sequences on one device: rank 0 while the others wait."""
    single_backward_ms: list[float] | None
    single_reason: str | None
    error_rows: int
    error_ulps: dict[str, float]
    """The largest errors of `error_rows` tokens against float64, in units in the last place of the dtype at
    each row's own maximum."""
    control_error_ulps: dict[str, float] | None
    """The single device's."""


class AttentionFacts(PassFacts[RankCalls, AttentionCalls]):
    name = "attention"
    part = RankCalls

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> AttentionCalls:  # noqa: ARG002
        """Times by rank; what rank 0 alone measured is rank 0's."""
        parts = self.parts(reports)
        first = parts[0]
        return AttentionCalls(
            forward_ms=by_rank(parts, "forward_ms"),
            backward_ms=by_rank(parts, "backward_ms"),
            single_forward_ms=first.single.single_forward_ms,
            single_backward_ms=first.single.single_backward_ms,
            single_reason=first.single.single_reason,
            error_rows=first.error_rows,
            error_ulps=first.error_ulps,
            control_error_ulps=first.single.control_error_ulps,
        )

    def gate(self, cell: RunConfig, section: AttentionCalls) -> str | None:
        """The results of a timed call are numbers."""
        for name, error in section.error_ulps.items():
            if not error < math.inf:
                return (
                    f"attention: {name} of a timed call at {cell.seq_len:,} tokens is not finite everywhere"
                )
        return None

    def checks(self, cell: RunConfig, section: AttentionCalls | None) -> list[Check]:
        """The last timed call; of a cell that trains none."""
        if cell.workload.name != "attention":
            return []
        check = Check(what="results of a timed call", against="finite numbers")
        if section is None:
            return [replace(check, reason=NOT_RUN)]
        return [replace(check, tokens=cell.seq_len, steps=1, of_steps=len(section.forward_ms[0]))]


FACTS = AttentionFacts()
