"""Section, gate and checks of the engagement pass: shapes and bytes in one inspected step. No torch.

The pass shows that the configured strategy was really engaged. The most common fault in this field is a
configuration that is accepted and silently not applied.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import USER_CODE, Cell, MeasureConfig
from bench.measure.check import Check
from bench.measure.facts import (
    NO_OTHER_RANKS,
    NOT_RUN,
    FaultOrigin,
    PassFacts,
    RankReport,
    join_by_rank,
    lists_by_name,
)
from bench.measure.timing.section import affordable_steps
from bench.ranks.log import RankStage
from bench.strategies import STRATEGIES
from bench.training.messages import Messages

NOT_RECORDED = (
    "torch's flight recorder has not kept all calls of any timed step (TORCH_FR_BUFFER_SIZE raises its limit"
    " of 2000), or the system's clock was set"
)


class EngagementSection(Struct, frozen=True, kw_only=True):
    """Shapes, bytes and modules of attention in one full-length step, as proof of the configuration."""

    attention_name: str
    modules: list[str]
    """Python modules with attention code that rank 0 entered in its first step."""
    attention_shapes: list[list[list[int]]]
    """Distinct [tokens, query heads, KV heads] of attention's inputs, by rank."""
    sent_bytes: dict[str, list[int]]
    """Payload bytes that leave a rank in the step, by purpose and rank."""
    calls: dict[str, int]
    """Number of rank 0's communication calls, by purpose and kind."""
    compared_steps: list[int] = []
    """Number of timed steps whose attention calls were compared with those of the inspected step, by rank."""
    call_differences: list[str | None] = []
    """First timed step whose attention calls differ, by rank; null if none does."""
    messages: list[Messages] | None = None
    """Communication calls of a replayed rank, equal calls counted together; a receive has the bytes that
    arrive. Null without a replay."""


class EngagementFacts(PassFacts[EngagementSection, EngagementSection]):
    name = "engagement"
    part_type = EngagementSection
    is_evidence = True
    fault_origin = FaultOrigin.INSPECTED_STEP

    def stages(self, measure: MeasureConfig, step_s: float) -> list[RankStage]:
        return [] if will_share_traced_step(measure, step_s) else [RankStage("engagement", steps=1)]

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> EngagementSection:  # noqa: ARG002
        parts = self.parts(reports)
        sent = [{name: sent[0] for name, sent in part.sent_bytes.items()} for part in parts]
        by_rank = join_by_rank(parts, "attention_shapes", "compared_steps", "call_differences")
        return replace(parts[0], **by_rank, sent_bytes=lists_by_name(sent))

    def gate(self, cell: Cell, section: EngagementSection) -> str | None:
        """Return a message if shapes or bytes differ from the formula, or calls of timed from inspected ones.

        A strategy outside the table of strategies has no formula and always passes. A user's own loop may
        make other calls in each step.
        """
        if cell.strategy not in STRATEGIES:
            return None
        wrong = _why_shapes_are_wrong(cell, section) or _why_bytes_are_wrong(cell, section)
        differs = next(filter(None, section.call_differences), None)
        if wrong is not None or differs is None or cell.trainer == USER_CODE:
            return wrong
        rank = cell.running_ranks[section.call_differences.index(differs)]
        return f"rank {rank}: {differs}; attention sends other data when it is inspected"

    def checks(self, cell: Cell, section: EngagementSection | None) -> list[Check]:
        """Return the checks of attention's input shapes, and of the bytes that it sent in each step."""
        unknown = None if cell.strategy in STRATEGIES else f"no formula of strategy {cell.strategy} is known"
        reason = NOT_RUN if section is None else unknown
        tokens, steps = (cell.seq_len, 1) if reason is None else (None, None)
        formulas = [
            Check(what=what, against="the strategy's formula", tokens=tokens, steps=steps, reason=reason)
            for what in ("shapes in attention", "bytes that attention exchanges")
        ]
        if unknown is not None or cell.trainer == USER_CODE:
            return formulas
        communicates = STRATEGIES[cell.strategy].communication_bytes(cell) > 0
        return [*formulas, _timed_calls_check(cell, section)] if communicates else formulas


def _timed_calls_check(cell: Cell, section: EngagementSection | None) -> Check:
    check = Check(what="attention's calls in timed steps", against="the inspected step")
    if section is None:
        return replace(check, reason=NOT_RUN)
    if cell.replay.rank is not None:
        return replace(check, reason=NO_OTHER_RANKS)
    steps = min(section.compared_steps, default=0)
    return replace(check, tokens=cell.seq_len, steps=steps) if steps else replace(check, reason=NOT_RECORDED)


def will_share_traced_step(measure: MeasureConfig, step_s: float) -> bool:
    """Return whether the traced step is expected to be the inspected step, too.

    The rank decides this itself once it knows its step times; `step_s` is an estimate.
    """
    return measure.trace and measure.budget_s > 0 and affordable_steps(measure, step_s) == 0


def _why_shapes_are_wrong(cell: Cell, engagement: EngagementSection) -> str | None:
    """Return a message about the first rank whose attention's input is not one shard with all heads."""
    expected = [[cell.shard_len, cell.model.num_heads, cell.model.num_kv_heads]]
    for rank, shapes in zip(cell.running_ranks, engagement.attention_shapes, strict=True):
        if shapes != expected:
            return (
                f"rank {rank}: attention was given (tokens, query heads, KV heads) = {shapes},"
                f" not {expected}; {cell.strategy} over sp_degree={cell.sp_degree} was not applied as"
                " configured"
            )
    return None


def _why_bytes_are_wrong(cell: Cell, engagement: EngagementSection) -> str | None:
    """Return a message about the first rank whose attention did not send the bytes of the strategy's formula.

    This project wrote the formulas of packages, too. Other bytes may therefore mean a wrong formula.
    """
    facts = STRATEGIES[cell.strategy]
    cause = "it was not applied as configured"
    if facts.package is not None:
        cause = f"{cause}, or our formula is not that of {facts.package}"
    zeros = [0] * len(cell.running_ranks)
    sent_bytes = engagement.sent_bytes.get("attention", zeros)
    for rank, sent in zip(cell.running_ranks, sent_bytes, strict=True):
        expected = facts.rank_communication_bytes(cell, rank % cell.sp_degree)
        if sent != expected:
            return (
                f"rank {rank}: attention sent {sent} bytes in a step, but {cell.strategy} over"
                f" sp_degree={cell.sp_degree} has to send {expected}; {cause}"
            )
    return None


FACTS = EngagementFacts()
