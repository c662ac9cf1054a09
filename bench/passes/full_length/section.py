"""Attention of the cell's own step, at the measured length, against float64. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.passes.facts import NOT_RUN, Moment, PassFacts, RankReport, first_beyond, worst_by_name
from bench.record import Check

SAMPLED_ROWS = 32
"""Over all ranks that share a sequence, of every head."""
WHAT = {
    "out": "out of the sampled rows is off by",
    "dq": "dq of the sampled rows is off by",
    "dk": "dk and dq disagree about the scores' gradients by",
    "dv": "dv and out disagree about the weights by",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FullLength:
    """One call of attention in the inspected step, gradients included."""

    tokens: int
    rows: int
    """Of `out` and `dq`, drawn anew for every cell, over all ranks of a sequence, of every head."""
    errors: dict[str, float]
    """Of `out` and `dq`: the length of the sampled rows' deviation from float64, relative to theirs.
    Of `dk` and `dv`: by how much an identity over all tokens is missed, relative to its terms."""
    limits: dict[str, float]
    reason: str | None = None
    """Why there are no errors."""


class FullLengthFacts(PassFacts[FullLength, FullLength]):
    name = "full_length"
    part = FullLength
    is_evidence = True
    judges = Moment.INSPECTED_STEP

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> FullLength:  # noqa: ARG002
        """The largest errors of any sequence; the ranks that share one agree."""
        parts = self.parts(reports)
        return FullLength(
            tokens=parts[0].tokens,
            rows=parts[0].rows,
            errors=worst_by_name([part.errors for part in parts]),
            limits=worst_by_name([part.limits for part in parts]),
            reason=parts[0].reason,
        )

    def gate(self, cell: RunConfig, section: FullLength) -> str | None:  # noqa: ARG002
        """Every error is within its limit."""
        name = first_beyond(section.errors, section.limits)
        if name is None:
            return None
        error, limit = section.errors[name], section.limits[name]
        said = f"{WHAT[name]} {error:.1e} (limit {limit:.1e})"
        if not math.isfinite(error):
            said = f"{name} is not finite"
        return f"attention at {section.tokens:,} tokens: {said}"

    def checks(self, cell: RunConfig, section: FullLength | None) -> list[Check]:  # noqa: ARG002
        """Of one call."""
        made = section is not None and section.reason is None
        return [
            Check(
                what="attention at full length",
                against="float64",
                tokens=section.tokens if section is not None and made else None,
                rows=section.rows if section is not None and made else None,
                steps=1 if made else None,
                reason=NOT_RUN if section is None else section.reason,
            )
        ]


FACTS = FullLengthFacts()
