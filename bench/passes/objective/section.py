"""Every parameter's gradient on the cell's own engine, of one step, against float64. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.passes.facts import NOT_RUN, Moment, PassFacts, RankReport, first_beyond
from bench.record import Check

MAX_TOKENS = 1024
"""Of a sequence: float64 attention takes the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One short step of the cell's own model, engine, checkpointing and accumulation, before all others.

    A third of the labels does not count, so that ranks hold unequal numbers of valid tokens.
    """

    tokens: int
    """Of each sequence."""
    sequences: int
    parameters: int
    """How many parameters' gradients were compared."""
    errors: dict[str, float]
    """Relative to float64: of `loss`, of the `gradient of` that parameter which comes nearest to its
    limit, of the part parallel to the exact gradient, the `scale of the gradient of` a parameter, and of two
    norms against that of the gradients. Empty on ranks that compare nothing."""
    limits: dict[str, float]
    reason: str | None = None
    """Why nothing was compared."""


class ObjectiveFacts(PassFacts[Objective, Objective]):
    name = "objective"
    part = Objective
    is_evidence = True
    judges = Moment.BEFORE_STEPS

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Objective:  # noqa: ARG002
        """What rank 0 found: it has the whole gradients."""
        return self.parts(reports)[0]

    def gate(self, cell: RunConfig, section: Objective) -> str | None:
        """Loss, every gradient and the norms are within their limits."""
        name = first_beyond(section.errors, section.limits)
        if name is None:
            return None
        error, limit = section.errors[name], section.limits[name]
        said = f"off by {error:.1e} at {section.tokens:,} tokens (limit {limit:.1e})"
        if not math.isfinite(error):
            said = f"missing or not finite at {section.tokens:,} tokens"
        return f"objective on engine={cell.engine}: the {name} is {said}"

    def checks(self, cell: RunConfig, section: Objective | None) -> list[Check]:
        """Loss and gradients of one step of its own, where something is trained."""
        if cell.workload.name != "train":
            return []
        made = section is not None and section.reason is None
        return [
            Check(
                what="every gradient on the cell's engine",
                against="float64",
                tokens=section.tokens if section is not None and made else None,
                reason=NOT_RUN if section is None else section.reason,
            )
        ]


def objective_tokens(seq_len: int, multiple: int) -> int:
    """The most tokens up to 1,024, and up to the cell's own length, that the layout divides."""
    return max(multiple, min(MAX_TOKENS, seq_len) // multiple * multiple)


FACTS = ObjectiveFacts()
