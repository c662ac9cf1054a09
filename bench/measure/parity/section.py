"""Results against float64: the parity pass without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from bench.config import OWN, Cell
from bench.measure.check import Check
from bench.measure.facts import ErrorFacts, Moment, RankReport, by_rank

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


class ParitySection(Struct, frozen=True, kw_only=True):
    """Attention against float64, by tensor: the largest error of any rank.

    A cell beyond a limit has no timing. A rank that compares nothing itself has no errors and no limits.
    """

    checked_cell: str = ""
    """The cell that was checked: one of the same sweep may stand for others that differ in nothing the check
    depends on."""
    tokens: int
    errors: Mapping[str, float | None]
    """Of `out`, `lse`, `dq`, `dk` and `dv`, relative to the exact tensor's maximum."""
    limits: Mapping[str, float | None]
    reason: str | None = None
    """Why there are no errors."""

    def __post_init__(self) -> None:
        if self.errors.keys() - self.limits.keys():
            raise ValueError("Expected a limit for each of errors")


class ParityFacts(ErrorFacts[ParitySection]):
    name = "parity"
    part = ParitySection
    judges = Moment.BEFORE_STEPS
    without_effect = frozenset(
        {"engine", "optimizer", "data", "measure", "checkpointing", "tiled_mlp", "offload", "hardware"}
    )
    max_tokens = MAX_TOKENS
    compares = ("attention",)
    too_large = (
        "attention parity: {name} of a real step at {tokens:,} tokens is off by {error:.1e} of its maximum"
        " (limit {limit:.1e})"
    )
    not_finite = "attention parity: {name} of a real step at {tokens:,} tokens is not finite"

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> ParitySection:
        """Return the largest errors; none where any rank compared nothing."""
        reason = next(filter(None, by_rank(self.parts(reports), "reason")), None)
        found = replace(super().merge(reports, cell), checked_cell=cell.cell_id, reason=reason)
        return found if reason is None else replace(found, errors={}, limits={})

    def made(self, cell: Cell, section: ParitySection) -> list[Check]:
        """Return the check of attention; `bench.observe` compares one step of the user's loop."""
        elsewhere = "" if section.checked_cell == cell.cell_id else f", in cell {section.checked_cell}"
        own_step = 1 if cell.trainer == OWN else None
        return [Check(what="attention", against=f"float64{elsewhere}", tokens=section.tokens, steps=own_step)]


FACTS = ParityFacts()
