"""Proof that what was asked for ran: the engagement pass without torch.

A configuration that is accepted and silently not applied is the field's commonest fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell, MeasureConfig
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, Moment, PassFacts, RankReport, by_name, together
from bench.measure.timing.section import affordable_steps
from bench.ranks.log import RankStage
from bench.strategies import STRATEGIES
from bench.training.messages import Messages


class EngagementSection(Struct, frozen=True, kw_only=True):
    """Proof that what was asked for ran, from one full-length step."""

    attention_name: str
    """The name under which transformers knew the attention."""
    modules: list[str]
    """The Python modules of attention code that were entered in a step on rank 0."""
    attention_shapes: list[list[list[int]]]
    """By rank the distinct [tokens, query heads, KV heads] that attention was given."""
    sent_bytes: dict[str, list[int]]
    """By purpose and rank what was handed to collectives: payload that leaves the rank."""
    calls: dict[str, int]
    """How many calls rank 0 made of each purpose and kind."""
    messages: list[Messages] | None = None
    """Calls of a replayed rank, equal ones counted together; a receive's bytes are those that arrive."""


class EngagementFacts(PassFacts[EngagementSection, EngagementSection]):
    name = "engagement"
    part = EngagementSection
    is_evidence = True
    judges = Moment.INSPECTED_STEP

    def stages(self, measure: MeasureConfig, step_s: float) -> list[RankStage]:
        return [] if will_share_traced_step(measure, step_s) else [RankStage("engagement", steps=1)]

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> EngagementSection:  # noqa: ARG002
        parts = self.parts(reports)
        sent = [{name: own[0] for name, own in part.sent_bytes.items()} for part in parts]
        return replace(parts[0], **together(parts, "attention_shapes"), sent_bytes=by_name(sent))

    def gate(self, cell: Cell, section: EngagementSection) -> str | None:
        """Shapes and bytes are the strategy's; of one that is in no table no formula is known."""
        if cell.strategy not in STRATEGIES:
            return None
        return _wrong_shapes(cell, section) or _wrong_exchange(cell, section)

    def checks(self, cell: Cell, section: EngagementSection | None) -> list[Check]:
        """What attention was given and what it exchanged in one step."""
        unknown = None if cell.strategy in STRATEGIES else f"no formula of strategy {cell.strategy} is known"
        reason = NOT_RUN if section is None else unknown
        tokens, steps = (cell.seq_len, 1) if reason is None else (None, None)
        return [
            Check(what=what, against="the strategy's formula", tokens=tokens, steps=steps, reason=reason)
            for what in ("shapes in attention", "bytes that attention exchanges")
        ]


def will_share_traced_step(measure: MeasureConfig, step_s: float) -> bool:
    """Whether it is expected that one step is inspected and traced at once, as a rank then decides."""
    return measure.trace and measure.budget_s > 0 and affordable_steps(measure, step_s) == 0


def _wrong_shapes(cell: Cell, engagement: EngagementSection) -> str | None:
    """Attention on every rank was given a shard of the sequence and all heads."""
    expected = [[cell.shard_len, cell.model.num_heads, cell.model.num_kv_heads]]
    for rank, seen in zip(cell.running_ranks, engagement.attention_shapes, strict=True):
        if seen != expected:
            return (
                f"rank {rank}: attention was given (tokens, query heads, KV heads) = {seen}, not {expected};"
                f" {cell.strategy} over sp_degree={cell.sp_degree} was not applied as configured"
            )
    return None


def _wrong_exchange(cell: Cell, engagement: EngagementSection) -> str | None:
    """Attention handed to collectives exactly the bytes that the strategy's formula says.

    The formula is ours, also for a package: that its bytes differ does not show that its numbers are wrong.
    """
    facts = STRATEGIES[cell.strategy]
    cause = "it was not applied as configured"
    if facts.package is not None:
        cause = f"{cause}, or our formula is not that of {facts.package}"
    nothing = [0] * len(cell.running_ranks)
    for rank, seen in zip(cell.running_ranks, engagement.sent_bytes.get("attention", nothing), strict=True):
        expected = facts.rank_communication_bytes(cell, rank % cell.sp_degree)
        if seen != expected:
            return (
                f"rank {rank}: attention exchanged {seen} bytes in a step, {cell.strategy} over"
                f" sp_degree={cell.sp_degree} has to exchange {expected}; {cause}"
            )
    return None


FACTS = EngagementFacts()
