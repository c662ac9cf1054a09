"""Section, gate and checks of the positions pass: rotary cos and sin of every rank. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, FaultOrigin, PassFacts, RankReport, field_by_rank, join_by_rank
from bench.training.text_model import LENGTH_DEPENDENT_ROPE


class PositionsSection(Struct, frozen=True, kw_only=True):
    """Differences of every rank's rotary cos and sin from those of the whole sequence on one device."""

    compared: int
    """Number of modules that returned cos and sin and were compared, the smallest of all ranks."""
    rotations: int = 0
    """Number of calls in layers whose rotated queries and keys were compared, the smallest of all ranks."""
    rope_type: str | None
    """Rope type of the named module, by the model's configuration; null for a layer, or without a module."""
    module: list[str | None]
    """First module or layer that rotates by other angles, by rank; null if none does."""
    position: list[int | None]
    """First compared position at which `module` rotates by other angles, by rank; null if none does."""
    error: Sequence[float | None]
    """Largest difference of a cos or sin, also of those by which layers rotate, by rank."""
    reason: str | None
    """Reason for comparing nothing, or not every module, on some rank; null if all were compared."""


class PositionsFacts(PassFacts[PositionsSection, PositionsSection]):
    name = "positions"
    part_type = PositionsSection
    workload = "train"
    is_own_work = False
    is_evidence = True
    fault_origin = FaultOrigin.MODEL
    """Origin of wrong angles. They are wrong from the first step on and may cause errors that other passes'
    gates find, so this gate comes first."""

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> PositionsSection:  # noqa: ARG002
        parts = self.parts(reports)
        wrong = (part.rope_type for part in parts if part.module != [None])
        return PositionsSection(
            **join_by_rank(parts, "module", "position", "error"),
            compared=min(field_by_rank(parts, "compared")),
            rotations=min(field_by_rank(parts, "rotations")),
            rope_type=next(wrong, parts[0].rope_type),
            reason=next(filter(None, field_by_rank(parts, "reason")), None),
        )

    def gate(self, cell: Cell, section: PositionsSection) -> str | None:
        """Return a message about the first rank whose angles differ from one device's; None without one."""
        index = next((index for index, module in enumerate(section.module) if module is not None), None)
        if index is None:
            return None
        rank, rope_type = cell.running_ranks[index], section.rope_type
        cause = (
            "chooses frequencies by the largest position that a rank is given; set them for"
            f" {cell.seq_len} tokens before training, or use a rope_type that does not depend on the length,"
            " such as yarn"
            if rope_type in LENGTH_DEPENDENT_ROPE
            else "does not rotate by the position_ids that the model is given; use them in its forward"
        )
        return (
            f"positions: rank {rank} rotates position {section.position[index]} by other angles than one"
            " device with the whole sequence. The model's code or configuration is wrong, not the strategy:"
            f" {section.module[index]}{f' (rope_type={rope_type})' if rope_type else ''} {cause}"
        )

    def checks(self, cell: Cell, section: PositionsSection | None) -> list[Check]:
        """Return the check of rotary positions; no check if each rank holds whole sequences."""
        if cell.sp_degree == 1:
            return []
        extent = f", in {section.rotations} calls of layers" if section and section.rotations else ""
        check = Check(what="rotary positions", against=f"those of the whole sequence on one device{extent}")
        if section is None or section.compared == 0:
            return [replace(check, reason=(section and section.reason) or NOT_RUN)]
        return [replace(check, tokens=cell.seq_len, steps=1, reason=section.reason)]


FACTS = PositionsFacts()
