"""Results against float64: the parity pass without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.config import OWN, RunConfig
from bench.measure.facts import NOT_RUN, Moment, PassFacts, RankReport, first_beyond, worst_by_name
from bench.record.record import Check

FACTORS: Mapping[str, float] = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 4.0, "dv": 4.0, "loss": 3.0}
"""Strategies erred as much as plain attention in `out` and `dq`, up to 2.9 times as much in `dk` and `dv`; in
a probe's losses, whose control is one rank, up to 1.3 times."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What is allowed however little plain attention errs: where both err by rounding alone it is chance."""

    forward: float
    backward: float
    loss: float


FLOORS: Mapping[str, Floor] = {
    "fp64": Floor(1e-12, 1e-12, 1e-12),
    "fp32": Floor(1e-5, 1e-5, 1e-5),
    "fp16": Floor(0.0, 2e-3, 1e-4),
    "bf16": Floor(0.0, 0.0, 1e-4),
}
"""In fp16 `math` erred by up to 1.1e-3 in `dq`, 2.6 times as much as plain attention."""


def limit_of(name: str, dtype: str, plain_error: float) -> float:
    """The limit of `out`, `lse`, `dq`, `dk` or `dv`, relative to the exact tensor's maximum, or of `loss`.

    So many times the error of plain arithmetic, finite also where that overflows, and at least the floor.
    """
    floor = FLOORS[dtype]
    least = floor.loss if name == "loss" else floor.backward if name.startswith("d") else floor.forward
    return max(least, FACTORS[name] * min(1.0, plain_error))


MAX_TOKENS = 512
"""Parity is checked at no more: float64 attention takes the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Attention against float64, by tensor: the largest error of any rank.

    A cell beyond a limit has no timing. A rank that compares nothing itself has no errors and no limits.
    """

    checked_in: str = ""
    """The cell that was checked: one of the same sweep may stand for others that differ in nothing the check
    depends on."""
    tokens: int
    errors: dict[str, float]
    """Of `out`, `lse`, `dq`, `dk` and `dv`, relative to the exact tensor's maximum."""
    limits: dict[str, float]
    reason: str | None = None
    """Why there are no errors."""


class ParityFacts(PassFacts[Parity, Parity]):
    name = "parity"
    part = Parity
    needs_all_ranks = True
    is_evidence = True
    judges = Moment.BEFORE_STEPS
    without_effect = frozenset(
        {"engine", "optimizer", "data", "measure", "checkpointing", "tiled_mlp", "offload", "hardware"}
    )
    max_tokens = MAX_TOKENS

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Parity:
        parts = self.parts(reports)
        reason = next((part.reason for part in parts if part.reason is not None), None)
        compared = [] if reason else parts
        return Parity(
            checked_in=cell.cell_id,
            tokens=parts[0].tokens,
            errors=worst_by_name([part.errors for part in compared]),
            limits=worst_by_name([part.limits for part in compared]),
            reason=reason,
        )

    def gate(self, cell: RunConfig, section: Parity) -> str | None:  # noqa: ARG002
        """Every error is within its limit; a rank that checks on inputs of its own stops before this."""
        name = first_beyond(section.errors, section.limits)
        if name is None:
            return None
        error, limit = section.errors[name], section.limits[name]
        said = f"is off by {error:.1e} of its maximum (limit {limit:.1e})"
        if not math.isfinite(error):
            said = "is not finite"
        return f"attention parity: {name} of a real step at {section.tokens:,} tokens {said}"

    def checks(self, cell: RunConfig, section: Parity | None) -> list[Check]:
        """Attention alone."""
        if section is None or "out" not in section.errors:
            reason = NOT_RUN if section is None else section.reason or NOT_RUN
            return [Check(what="attention", against="float64", reason=reason)]
        elsewhere = "" if section.checked_in == cell.cell_id else f", in cell {section.checked_in}"
        own_step = 1 if cell.trainer == OWN else None
        return [Check(what="attention", against=f"float64{elsewhere}", tokens=section.tokens, steps=own_step)]


FACTS = ParityFacts()
