"""Every parameter's gradient on the cell's own engine, of one step, against float64. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import ErrorFacts, Moment, RankReport

OF_ENGINE = "every gradient on the cell's engine"
MAX_TOKENS = 1024
"""Of a sequence: float64 attention takes the square of their number."""


class ObjectiveSection(Struct, frozen=True, kw_only=True):
    """One short step of the cell's own model, engine, checkpointing and accumulation, before all others.

    A third of the labels does not count, so that ranks hold unequal numbers of valid tokens.
    """

    tokens: int
    """Of each sequence."""
    sequences: int
    parameters: int = 0
    """How many parameters' gradients were compared."""
    errors: Mapping[str, float | None] = {}
    """Relative to float64: of `loss`, of the `gradient of` that parameter which comes nearest to its
    limit, of the part parallel to the exact gradient, the `scale of the gradient of` a parameter, and of two
    norms against that of the gradients. Empty on ranks that compare nothing."""
    limits: Mapping[str, float | None] = {}
    noise: Mapping[str, float | None] = {}
    """How far steps that are equal in exact arithmetic are from float64 in this dtype, relative, root mean
    square: of the `loss` of some rows, and of the whole gradient, which bounds the `grad_norm`. Empty where
    not all gradients were compared."""
    mistakes: Mapping[str, float | None] = {}
    """By how much known mistakes would move the gradient in which they show most, relative."""
    mistake_limits: Mapping[str, float | None] = {}
    """The limit of that gradient: a mistake that is no larger would not be found."""
    compared_parameters: str | None = None
    """Parameters whose gradients were compared, in words; null where all were."""
    left_out_reason: str | None = None
    """Reason for not comparing the other gradients; null where all were compared."""
    cause: str | None = None
    """What alone would explain gradients beyond their limits; null where nothing known does."""
    not_finite_ranks: list[int] = []
    """Ranks whose own losses in that step are not finite."""
    reason: str | None = None
    """Why nothing was compared."""


class ObjectiveFacts(ErrorFacts[ObjectiveSection]):
    name = "objective"
    part = ObjectiveSection
    workload = "train"
    judges = Moment.BEFORE_STEPS
    compares = (OF_ENGINE,)
    too_large = (
        "objective on engine={engine}: the {name} is off by {error:.1e} at {tokens:,} tokens"
        " (limit {limit:.1e})"
    )
    not_finite = "objective on engine={engine}: the {name} is missing or not finite at {tokens:,} tokens"

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> ObjectiveSection:  # noqa: ARG002
        """Return the section of rank 0, which has the whole gradients."""
        parts = self.parts(reports)
        return replace(parts[0], not_finite_ranks=[rank for part in parts for rank in part.not_finite_ranks])

    def gate(self, cell: Cell, section: ObjectiveSection) -> str | None:
        """Return a message about losses that are not finite, or an error beyond its limit and its cause."""
        if section.not_finite_ranks:
            ranks = ", ".join(map(str, section.not_finite_ranks))
            lost = f"the losses of {section.tokens:,} tokens are not finite on rank {ranks}"
            return f"objective on engine={cell.engine.name}: {lost}"
        wrong = super().gate(cell, section)
        return wrong if wrong is None or section.cause is None else f"{wrong}; {section.cause}"

    def made(self, cell: Cell, section: ObjectiveSection) -> list[Check]:  # noqa: ARG002
        """Return the checks of the loss and the gradients of one step."""
        found = Check(what=OF_ENGINE, against="float64", tokens=section.tokens, below_noise=_hidden(section))
        if section.compared_parameters is None:
            return [found]
        return [
            replace(found, what=f"gradients on the cell's engine of {section.compared_parameters}"),
            Check(what=OF_ENGINE, against="float64", reason=section.left_out_reason),
        ]


def _hidden(section: ObjectiveSection) -> str | None:
    """The known mistake that rounding would hide, with its two figures."""
    for name, size in section.mistakes.items():
        limit = section.mistake_limits[name]
        if size is not None and limit is not None and size <= limit:
            return f"{name} would move a gradient by {size:.1e}; rounding is allowed {limit:.1e}"
    return None


def objective_tokens(seq_len: int, multiple: int) -> int:
    """The most tokens up to 1,024, and up to the cell's own length, that the layout divides."""
    return max(multiple, min(MAX_TOKENS, seq_len) // multiple * multiple)


FACTS = ObjectiveFacts()
