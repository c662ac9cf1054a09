"""Every parameter's gradient on the cell's own engine, of one step, against float64. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.config import RunConfig
from bench.measure.facts import NOT_RUN, Moment, PassFacts, RankReport, first_beyond
from bench.record.record import Check

OF_ENGINE = "every gradient on the cell's engine"
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
    parameters: int = 0
    """How many parameters' gradients were compared."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative to float64: of `loss`, of the `gradient of` that parameter which comes nearest to its
    limit, of the part parallel to the exact gradient, the `scale of the gradient of` a parameter, and of two
    norms against that of the gradients. Empty on ranks that compare nothing."""
    limits: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    """How far steps that are equal in exact arithmetic are from float64 in this dtype, relative, root mean
    square: of the `loss` of some rows, and of the whole gradient, which bounds the `grad_norm`. Empty where
    not all gradients were compared."""
    mistakes: dict[str, float] = field(default_factory=dict)
    """By how much known mistakes would move the gradient in which they show most, relative."""
    mistake_limits: dict[str, float] = field(default_factory=dict)
    """The limit of that gradient: a mistake that is no larger would not be found."""
    compared: str | None = None
    """Parameters whose gradients were compared, in words; null where all were."""
    left_out_because: str | None = None
    """Reason for not comparing the other gradients; null where all were compared."""
    cause: str | None = None
    """What alone would explain gradients beyond their limits; null where nothing known does."""
    lost_on: list[int] = field(default_factory=list)
    """Ranks whose own losses in that step are not finite."""
    reason: str | None = None
    """Why nothing was compared."""


class ObjectiveFacts(PassFacts[Objective, Objective]):
    name = "objective"
    part = Objective
    needs_all_ranks = True
    is_evidence = True
    judges = Moment.BEFORE_STEPS

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Objective:  # noqa: ARG002
        """What rank 0 found: it has the whole gradients."""
        parts = self.parts(reports)
        return replace(parts[0], lost_on=[rank for part in parts for rank in part.lost_on])

    def gate(self, cell: RunConfig, section: Objective) -> str | None:
        """Loss, every gradient and the norms are within their limits."""
        where = f"engine={cell.engine.name}"
        if section.lost_on:
            lost = f"the losses of {section.tokens:,} tokens are not finite on rank"
            return f"objective on {where}: {lost} {', '.join(map(str, section.lost_on))}"
        name = first_beyond(section.errors, section.limits)
        if name is None:
            return None
        error, limit = section.errors[name], section.limits[name]
        said = f"off by {error:.1e} at {section.tokens:,} tokens (limit {limit:.1e})"
        if not math.isfinite(error):
            said = f"missing or not finite at {section.tokens:,} tokens"
        because = "" if section.cause is None else f"; {section.cause}"
        return f"objective on {where}: the {name} is {said}{because}"

    def checks(self, cell: RunConfig, section: Objective | None) -> list[Check]:
        """Loss and gradients of one step of its own, where something is trained."""
        if cell.workload.name != "train":
            return []
        against = "float64"
        if section is None or section.reason is not None:
            reason = NOT_RUN if section is None else section.reason
            return [Check(what=OF_ENGINE, against=against, reason=reason)]
        found = Check(what=OF_ENGINE, against=against, tokens=section.tokens, below_noise=_hidden(section))
        if section.compared is None:
            return [found]
        return [
            replace(found, what=f"gradients on the cell's engine of {section.compared}"),
            Check(what=OF_ENGINE, against=against, reason=section.left_out_because),
        ]


def _hidden(section: Objective) -> str | None:
    """The known mistake that rounding would hide, with its two figures."""
    for name, size in section.mistakes.items():
        limit = section.mistake_limits[name]
        if size <= limit:
            return f"{name} would move a gradient by {size:.1e}; rounding is allowed {limit:.1e}"
    return None


def objective_tokens(seq_len: int, multiple: int) -> int:
    """The most tokens up to 1,024, and up to the cell's own length, that the layout divides."""
    return max(multiple, min(MAX_TOKENS, seq_len) // multiple * multiple)


FACTS = ObjectiveFacts()
