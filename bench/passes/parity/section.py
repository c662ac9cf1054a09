"""Results against float64: the parity pass without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import OWN, RunConfig
from bench.passes.facts import NOT_RUN, Moment, PassFacts, RankReport, first_beyond, worst_by_name
from bench.record import Check
from bench.training.trainer_facts import TRAINER_FACTS

OF_A_STACK = "{trainer} builds engines of its own; every gradient is compared on that"
"""Why no stack trains a cut model, which has an engine of ours."""
MAX_TOKENS = 512
"""Parity is checked at no more: float64 attention takes the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParity:
    """What one rank found; errors and limits by tensor, empty on a rank that compares nothing itself."""

    tokens: int
    errors: dict[str, float]
    limits: dict[str, float]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Attention and objective against float64, by tensor: the largest error of any rank.

    A cell beyond a limit has no timing.
    """

    checked_in: str
    """The cell that was checked: one of the same sweep may stand for others that differ in nothing the check
    depends on."""
    tokens: int
    errors: dict[str, float]
    """Of `out`, `lse`, `dq`, `dk` and `dv` relative to the exact tensor's maximum, of `loss` and `gradients`
    (of a two-layer cut of the model) to its length."""
    limits: dict[str, float]
    reason: str | None = None
    """Why there are no errors."""


class ParityFacts(PassFacts[RankParity, Parity]):
    name = "parity"
    part = RankParity
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
        """Attention, and loss and gradients of the cut model where a cell trains one."""
        compared = {"attention": "out", "objective of a two-layer cut": "loss"}
        if cell.workload.name != "train":
            del compared["objective of a two-layer cut"]
        return [_check(what, tensor, cell, section) for what, tensor in compared.items()]


def _check(what: str, tensor: str, cell: RunConfig, section: Parity | None) -> Check:
    """The check that was made where `tensor` has an error."""
    if section is None or tensor not in section.errors:
        reason = NOT_RUN if section is None else section.reason or _why_missing(cell)
        return Check(what=what, against="float64", reason=reason)
    elsewhere = "" if section.checked_in == cell.cell_id else f", in cell {section.checked_in}"
    own_step = 1 if cell.trainer == OWN else None
    return Check(what=what, against=f"float64{elsewhere}", tokens=section.tokens, steps=own_step)


def _why_missing(cell: RunConfig) -> str:
    is_stack = cell.trainer in TRAINER_FACTS and TRAINER_FACTS[cell.trainer].is_stack
    return OF_A_STACK.format(trainer=cell.trainer) if is_stack else NOT_RUN


FACTS = ParityFacts()
