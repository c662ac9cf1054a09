"""Section, gate and checks of the objective pass: loss and gradients of a step. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import ErrorFacts, FaultOrigin, RankReport

ENGINE_CHECK = "every gradient on the cell's engine"
MAX_TOKENS = 1024
"""Largest number of tokens of a sequence. Float64 attention takes memory that grows with the square of it."""


class ObjectiveSection(Struct, frozen=True, kw_only=True):
    """Errors of one short step of the cell's own model, engine, checkpointing and accumulation.

    The step runs before all others. A third of its labels does not count, so that ranks hold unequal
    numbers of valid tokens.
    """

    tokens: int
    sequences: int
    parameters: int = 0
    errors: Mapping[str, float | None] = {}
    """Relative errors against float64 by name: `loss`; `gradient of` the parameter whose gradient is
    nearest to its limit; `scale of the gradient of` a parameter, the part of the error along the exact
    gradient; the scale of all compared gradients; and two norms, compared with the norm of the engine's
    gradients. Empty on ranks that compare nothing."""
    limits: Mapping[str, float | None] = {}
    """Largest errors that pass, by the names of `errors`."""
    noise: Mapping[str, float | None] = {}
    """Root mean square relative error, against float64, of the controls, which are equal in exact arithmetic:
    `loss` of a block of tokens, and `grad_norm`, the error of the whole gradient, which bounds the error of
    its norm. Empty unless all gradients were compared."""
    gradient_noise: Mapping[str, float | None] = {}
    """Largest root mean square relative error of the controls' gradients, by parameter without its layer."""
    mistakes: Mapping[str, float | None] = {}
    """Relative change that each known mistake would make to the gradient that shows it best, by mistake."""
    mistake_limits: Mapping[str, float | None] = {}
    """Limit of this change, by mistake. A mistake whose change is up to the limit would not be found."""
    compared_parameters: str | None = None
    """Parameters whose gradients were compared, in words; null if all were compared."""
    left_out_reason: str | None = None
    """Reason for not comparing the other gradients; null if all were compared."""
    cause: str | None = None
    """Known cause that alone would explain the gradients beyond their limits; null without one."""
    not_finite_ranks: list[int] = []
    """Ranks with a token loss in the step that is not finite."""
    reason: str | None = None
    """Reason for comparing nothing; null if the step was compared."""


class ObjectiveFacts(ErrorFacts[ObjectiveSection]):
    name = "objective"
    part_type = ObjectiveSection
    workload = "train"
    fault_origin = FaultOrigin.BEFORE_STEPS
    check_names = (ENGINE_CHECK,)
    too_large = (
        "objective on engine={engine}: the {name} is off by {error:.1e} at {tokens:,} tokens"
        " (limit {limit:.1e})"
    )
    not_finite = "objective on engine={engine}: the {name} is missing or not finite at {tokens:,} tokens"

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> ObjectiveSection:  # noqa: ARG002
        """Return the section of rank 0, which alone compares, with the `not_finite_ranks` of all ranks."""
        parts = self.parts(reports)
        return replace(parts[0], not_finite_ranks=[rank for part in parts for rank in part.not_finite_ranks])

    def gate(self, cell: Cell, section: ObjectiveSection) -> str | None:
        """Return a message about losses that are not finite, or an error beyond its limit with its cause."""
        if section.not_finite_ranks:
            ranks = ", ".join(map(str, section.not_finite_ranks))
            reason = f"the losses of {section.tokens:,} tokens are not finite on rank {ranks}"
            return f"objective on engine={cell.engine.name}: {reason}"
        message = super().gate(cell, section)
        return message if message is None or section.cause is None else f"{message}; {section.cause}"

    def error_checks(self, cell: Cell, section: ObjectiveSection) -> list[Check]:  # noqa: ARG002
        """Return the check of all gradients. If some were left out, it has a reason, and a second check."""
        check = Check(
            what=ENGINE_CHECK,
            against="float64",
            tokens=section.tokens,
            below_noise=_hidden_mistake(section),
        )
        if section.compared_parameters is None:
            return [check]
        return [
            replace(check, what=f"gradients on the cell's engine of {section.compared_parameters}"),
            Check(what=ENGINE_CHECK, against="float64", reason=section.left_out_reason),
        ]


def _hidden_mistake(section: ObjectiveSection) -> str | None:
    """Describe the first known mistake that rounding would hide, with size and limit; None without one."""
    for name, size in section.mistakes.items():
        limit = section.mistake_limits[name]
        if size is not None and limit is not None and size <= limit:
            return f"{name} would move a gradient by {size:.1e}; rounding is allowed {limit:.1e}"
    return None


def objective_tokens(seq_len: int, multiple: int) -> int:
    """Return the largest multiple of `multiple` up to 1,024 and `seq_len`; `multiple` itself if none is."""
    return max(multiple, min(MAX_TOKENS, seq_len) // multiple * multiple)


FACTS = ObjectiveFacts()
