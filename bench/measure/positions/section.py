"""Whether the model turns queries and keys by the angles that one device would use. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, Moment, PassFacts, RankReport, by_rank, together
from bench.training.text_model import BY_LENGTH


class PositionsSection(Struct, frozen=True, kw_only=True):
    """The rotary cos and sin of every rank, beside those of the whole sequence on one device."""

    compared: int
    """The fewest modules that any rank compared: those that returned cos and sin."""
    rope_type: str | None
    """As the configuration calls it; null where no module was compared."""
    module: list[str | None]
    """By rank the first module that differs."""
    position: list[int | None]
    """By rank the first position at which it does."""
    error: Sequence[float | None]
    """By rank the largest difference of a cos or sin."""
    reason: str | None
    """Why something was not compared on some rank."""


class PositionsFacts(PassFacts[PositionsSection, PositionsSection]):
    name = "positions"
    part = PositionsSection
    workload = "train"
    is_own_work = False
    is_evidence = True
    judges = Moment.MODEL
    """A model has these angles from its first step on: what other gates find may follow from them."""

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> PositionsSection:  # noqa: ARG002
        parts = self.parts(reports)
        wrong = (part.rope_type for part in parts if part.module != [None])
        return PositionsSection(
            **together(parts, "module", "position", "error"),
            compared=min(by_rank(parts, "compared")),
            rope_type=next(wrong, parts[0].rope_type),
            reason=next(filter(None, by_rank(parts, "reason")), None),
        )

    def gate(self, cell: Cell, section: PositionsSection) -> str | None:
        """Every rank turns its tokens as one device would; a difference is the model's."""
        place = next((place for place, module in enumerate(section.module) if module is not None), None)
        if place is None:
            return None
        rank, kind = cell.running_ranks[place], section.rope_type or "unknown"
        cause = (
            "chooses frequencies by the largest position that a rank is given: set them for"
            f" {cell.seq_len} tokens before training, or take a rope_type without a length, such as yarn"
            if kind in BY_LENGTH
            else "does not turn by the position_ids that the model is given: let its forward use them"
        )
        return (
            f"positions: rank {rank} turns position {section.position[place]} by other angles than one device"
            " with the whole sequence. The model's code or configuration is wrong, not the strategy:"
            f" {section.module[place]} (rope_type={kind}) {cause}"
        )

    def checks(self, cell: Cell, section: PositionsSection | None) -> list[Check]:
        """Where ranks share a sequence; one alone holds all positions."""
        if cell.sp_degree == 1:
            return []
        check = "rotary positions", "those of the whole sequence on one device"
        if section is None or section.compared == 0:
            reason = (section and section.reason) or NOT_RUN
            return [Check(what=check[0], against=check[1], reason=reason)]
        return [Check(what=check[0], against=check[1], tokens=cell.seq_len, steps=1, reason=section.reason)]


FACTS = PositionsFacts()
