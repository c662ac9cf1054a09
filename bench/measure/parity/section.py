"""Section, limits and checks of the parity pass: attention against float64. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import ErrorFacts, FaultOrigin, RankReport, field_by_rank

FACTORS: Mapping[str, float] = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 5.0, "dv": 5.0}
"""Largest error of a sound result by tensor, as a multiple of the error of plain attention in the same dtype.

The error of sound kernels was up to that of plain attention in `out`, 1.6 times as large in `dq`, and 4.4
times in `dk` and `dv`, which torch's CPU kernel rounds more at more tokens."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Smallest limits of a dtype.

    The error of plain attention may be small by chance and would then set too small a limit.
    """

    forward: float
    """Smallest limit of `out` and `lse`."""
    backward: float
    """Smallest limit of `dq`, `dk` and `dv`."""
    loss: float
    """Smallest limit of a loss."""


FLOORS: Mapping[str, Floor] = {
    "fp64": Floor(1e-12, 1e-12, 1e-12),
    "fp32": Floor(1e-5, 1e-5, 1e-5),
    "fp16": Floor(0.0, 2e-3, 1e-4),
    "bf16": Floor(0.0, 0.0, 1e-4),
}
"""Smallest limits by dtype. In fp16 the kernel `math` erred by up to 1.1e-3 in `dq`, 2.6 times as much as
plain attention."""


def parity_limit(name: str, dtype: str, plain_error: float) -> float:
    """Return the limit of the relative error of `out`, `lse`, `dq`, `dk` or `dv`.

    It is a multiple of the error of plain attention in the same dtype, at least the floor, and finite even if
    plain attention overflows. Errors are relative to the exact tensor's largest number.
    """
    floor = FLOORS[dtype].backward if name.startswith("d") else FLOORS[dtype].forward
    return max(floor, FACTORS[name] * min(1.0, plain_error))


MAX_TOKENS = 512
"""Largest number of tokens in the parity pass, because float64 attention takes memory that grows with its
square."""


class ParitySection(Struct, frozen=True, kw_only=True):
    """Largest error of attention against float64 over all ranks, by tensor.

    A cell with an error beyond its limit is not timed. If a rank compares nothing, there are no errors and
    limits, but a reason.
    """

    checked_cell: str = ""
    """ID of the cell that was checked. One cell is checked for all cells of a sweep that differ from it only
    in `ParityFacts.ignored_fields`."""
    tokens: int
    """Number of tokens of the compared sequence."""
    errors: Mapping[str, float | None]
    """Largest deviation of `out`, `lse`, `dq`, `dk` and `dv`, relative to the exact tensor's maximum."""
    limits: Mapping[str, float | None]
    """Largest errors that pass, by tensor."""
    reason: str | None = None
    """Reason for missing errors; null if attention was compared."""

    def __post_init__(self) -> None:
        if self.errors.keys() - self.limits.keys():
            raise ValueError("Expected a limit for each of errors")


class ParityFacts(ErrorFacts[ParitySection]):
    name = "parity"
    part_type = ParitySection
    fault_origin = FaultOrigin.BEFORE_STEPS
    ignored_fields = frozenset(
        {"engine", "optimizer", "data", "measure", "checkpointing", "tiled_mlp", "offload", "hardware"}
    )
    max_tokens = MAX_TOKENS
    check_names = ("attention",)
    too_large = (
        "attention parity: {name} at {tokens:,} tokens is off by {error:.1e} of its maximum"
        " (limit {limit:.1e})"
    )
    not_finite = "attention parity: {name} at {tokens:,} tokens is not finite"

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> ParitySection:
        """Return the largest errors of all ranks, or no errors if any rank compared nothing."""
        reason = next(filter(None, field_by_rank(self.parts(reports), "reason")), None)
        merged = replace(super().merge(reports, cell), checked_cell=cell.cell_id, reason=reason)
        return merged if reason is None else replace(merged, errors={}, limits={})

    def error_checks(self, cell: Cell, section: ParitySection) -> list[Check]:
        """Return the check of attention."""
        checked_cell = "" if section.checked_cell == cell.cell_id else f", in cell {section.checked_cell}"
        return [Check(what="attention", against=f"float64{checked_cell}", tokens=section.tokens)]


FACTS = ParityFacts()
