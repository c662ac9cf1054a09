"""Trace section of a record: where the time of a step went, by rank. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.common.rules import NonNegativeFloat, PerRank, PositiveFloat, Times, check_lengths
from bench.config import USER_CODE, Cell, MeasureConfig
from bench.cost.flops import causal_area
from bench.measure.check import Check
from bench.measure.documents.section import DocumentsSection
from bench.measure.engagement.section import will_share_traced_step
from bench.measure.facts import NOT_RUN, FaultOrigin, PassFacts, RankReport, lists_by_name
from bench.measure.trace.intervals import length
from bench.measure.trace.timeline import COMPUTE_PARTS
from bench.measure.trace.waiting import RankTrace, clock_bound_us, compute_waiting
from bench.ranks.log import RankStage
from bench.strategies import STRATEGIES

TRACED_STEPS = 5
"""Largest number of traced steps; several, because a single step of a few milliseconds is noisy."""
TRACED_PART = 0.5
"""Largest duration of all traced steps, as a share of `measure.budget_s`."""

UNEQUAL_RANKS = "Expected values of equally many ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTracedSteps:
    """One rank's traced steps in the order in which they ran."""

    steps: list[RankTrace]
    median: int
    """Index of the step of median length, each as long as on its slowest rank; equal on all ranks."""
    is_inspected: bool = False
    """Whether the only traced step is also the inspected step; equal on all ranks."""
    failure: str | None = None
    """Reason why this rank has no traced steps: an error of the profiler or of the trace reader."""


class TracedStep(Struct, frozen=True, kw_only=True):
    """One of several traced steps. Times are milliseconds by rank."""

    step_ms: Times
    purpose_exposed_ms: dict[str, PerRank]
    """Exposed communication by purpose and rank: in flight while the rank computed nothing."""
    purpose_exposed_waiting_ms: dict[str, PerRank] | None
    """Part of `purpose_exposed_ms` before the last rank arrived, by purpose and rank; null if unknown."""

    def __post_init__(self) -> None:
        waiting_ms = self.purpose_exposed_waiting_ms or {}
        check_lengths(UNEQUAL_RANKS, self.step_ms, *self.purpose_exposed_ms.values(), *waiting_ms.values())


class TraceSection(Struct, frozen=True, kw_only=True):
    """Steps under torch.profiler. Times are milliseconds by rank.

    All fields but `steps` describe the step of median length. The time of a kind, part or purpose counts once
    where its calls overlap. `compute_ms`, `purpose_exposed_ms`, `copies_ms` and `idle_ms` exclude one another
    and add up to `step_ms`. A purpose is attention, parameters, gradients, data_and_loss or other.
    """

    step_ms: list[PositiveFloat] = []
    """Length of the traced step by rank, the denominator of shares of the step. Empty if tracing failed (see
    `failure`)."""
    total_ms: list[NonNegativeFloat] = []
    """Time by rank in which any communication was in flight."""
    exposed_ms: list[NonNegativeFloat] = []
    """Part of `total_ms` in which the rank computed nothing. Communication in flight behind compute counts in
    `total_ms` only."""
    communication_ms: dict[str, list[float]] = {}
    calls: dict[str, list[int]] = {}
    """Number of communication calls by kind and rank."""
    purpose_total_ms: dict[str, PerRank] = {}
    purpose_exposed_ms: dict[str, PerRank] = {}
    purpose_waiting_ms: dict[str, PerRank] | None = None
    """Time by purpose and rank from this rank's arrival until the last rank of the collective arrives; null
    if the ranks' clocks or calls cannot be compared, for the reason in `waiting_unknown`."""
    purpose_exposed_waiting_ms: dict[str, PerRank] | None = None
    """Exposed part of `purpose_waiting_ms`, by purpose and rank."""
    compute_ms: dict[str, PerRank] | None = None
    """Compute by part and rank: `attention` is the kernels and arithmetic of attention, `packing` its copies
    and conversions, `optimizer` clipping and the update, `other` all else. Null if tracing failed."""
    idle_ms: PerRank | None = None
    """Time by rank without compute, communication or copies."""
    causal_area: list[int] | None = None
    """Unmasked (query, key, head) triples by rank in a layer, the mean over sequences; null if unknown."""
    purposes_unknown: list[str | None] = []
    """Reason by rank why purposes are unknown; null if they are known."""
    steps: list[TracedStep] = []
    """All traced steps in the order in which they ran."""
    median_step: int = 0
    """Index in `steps` of the step of median length, which all other fields and the kept trace describe."""
    is_inspected: bool = False
    """Whether the only traced step was also the inspected step, because time was short."""
    clock_bound_us: float | None = None
    """Largest error of the comparison of the hosts' clocks, over all ranks; lateness below it counts as 0.
    Null if all ranks read one clock."""
    waiting_unknown: str | None = None
    copies_ms: dict[str, PerRank] = {}
    """Time of GPU copies and fills without a kernel that neither compute nor communication covers, by part
    and rank: `packing` in attention, `optimizer`, `other`. Empty on a CPU."""
    torch_attention: list[str] | None = None
    """Operators of `scaled_dot_product_attention` in the step, of all ranks."""
    failure: str | None = None
    """Reason why there is no traced step: the rank, and the error of its profiler or trace."""

    def __post_init__(self) -> None:
        if self.failure is not None:
            return
        if not (self.step_ms and self.total_ms and self.exposed_ms):
            raise ValueError("a trace without a failure needs step_ms, total_ms and exposed_ms of every rank")
        if self.compute_ms is not None and not self.compute_ms.keys() >= {*COMPUTE_PARTS}:
            raise ValueError(f"Expected compute_ms with {', '.join(COMPUTE_PARTS)}")
        by_name = (
            self.purpose_total_ms, self.purpose_exposed_ms, self.purpose_exposed_waiting_ms, self.compute_ms,
            self.copies_ms,
        )  # fmt: skip
        named_lists = [per_rank for lists in by_name for per_rank in (lists or {}).values()]
        check_lengths(
            UNEQUAL_RANKS,
            self.step_ms,
            self.total_ms,
            self.exposed_ms,
            self.idle_ms,
            self.purposes_unknown or None,
            *named_lists,
        )


class TraceFacts(PassFacts[RankTracedSteps, TraceSection]):
    name = "trace"
    part_type = RankTracedSteps
    needs_all_ranks = True
    fault_origin = FaultOrigin.INSPECTED_STEP

    def is_requested(self, measure: MeasureConfig) -> bool:
        return measure.trace

    def stages(self, measure: MeasureConfig, step_s: float) -> list[RankStage]:
        is_inspected = will_share_traced_step(measure, step_s)
        return [RankStage("trace", steps=1 if is_inspected else traced_steps(measure, step_s))]

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> TraceSection:
        """Return the section of all ranks, with the waiting, which needs the arrivals on every rank.

        If tracing failed on a rank, the section has only the `failure` of the first such rank.
        """
        ranks = self.parts(reports)
        failed = next((rank for rank, part in enumerate(ranks) if part.failure is not None), None)
        if failed is not None:
            return TraceSection(failure=f"rank {failed}: {ranks[failed].failure}")
        traces_by_step = [*zip(*(rank.steps for rank in ranks), strict=True)]
        median = ranks[0].median
        traces, steps = traces_by_step[median], [*map(_traced_step, traces_by_step)]
        splits = [trace.split for trace in traces]
        waiting = compute_waiting(traces)
        return TraceSection(
            step_ms=[split.step_ms for split in splits],
            total_ms=[split.total_ms for split in splits],
            exposed_ms=[split.exposed_ms for split in splits],
            idle_ms=[split.idle_ms for split in splits],
            communication_ms=lists_by_name([split.communication_ms for split in splits]),
            calls=lists_by_name([split.calls for split in splits]),
            purpose_total_ms=lists_by_name([split.purpose_total_ms for split in splits]),
            compute_ms=lists_by_name([split.compute_ms for split in splits]),
            copies_ms=lists_by_name([split.copies_ms for split in splits]),
            purpose_exposed_ms=steps[median].purpose_exposed_ms,
            purpose_waiting_ms=None if isinstance(waiting, str) else waiting.waiting_ms,
            purpose_exposed_waiting_ms=steps[median].purpose_exposed_waiting_ms,
            causal_area=_causal_areas(cell, reports),
            purposes_unknown=[trace.purposes_unknown for trace in traces],
            steps=steps,
            median_step=median,
            is_inspected=ranks[0].is_inspected,
            clock_bound_us=clock_bound_us(traces),
            waiting_unknown=waiting if isinstance(waiting, str) else None,
            torch_attention=sorted({name for trace in traces for name in trace.torch_attention}),
        )

    def gate(self, cell: Cell, section: TraceSection) -> str | None:
        """Return a message about an attention kernel other than the cell's; a user's loop may choose one."""
        if cell.trainer == USER_CODE:
            return None
        others = {*(section.torch_attention or ())}.difference(KERNEL_FACTS[cell.kernel].sdpa_operators)
        if not others:
            return None
        return f"the traced step ran {', '.join(sorted(others))}, not kernel={cell.kernel}"

    def checks(self, cell: Cell, section: TraceSection | None) -> list[Check]:
        """Return the check of the attention kernel, unless a user's loop chose it."""
        return [] if cell.trainer == USER_CODE else [self._kernel_check(cell, section)]

    def _kernel_check(self, cell: Cell, section: TraceSection | None) -> Check:
        check = Check(what="attention kernel", against="torch's operators in the traced step")
        if section is None or section.failure is not None:
            return replace(check, reason=_why_no_section(cell) if section is None else section.failure)
        if not section.torch_attention:
            return replace(check, reason=f"torch.profiler shows no operator of kernel={cell.kernel}")
        return replace(check, tokens=cell.seq_len)


def _why_no_section(cell: Cell) -> str:
    return NOT_RUN if cell.measure.trace else "measure.trace=false"


def traced_steps(measure: MeasureConfig, step_s: float) -> int:
    """Return the number of steps to trace, 1 to TRACED_STEPS, if a step takes `step_s` seconds."""
    if measure.budget_s == 0:
        return TRACED_STEPS
    return max(1, min(TRACED_STEPS, int(TRACED_PART * measure.budget_s / step_s)))


def _traced_step(traces: Sequence[RankTrace]) -> TracedStep:
    """Return one step of all ranks, given every rank's trace of that step."""
    waiting = compute_waiting(traces)
    exposed_spans = [trace.split.exposed_spans_ms for trace in traces]
    return TracedStep(
        step_ms=[trace.split.step_ms for trace in traces],
        purpose_exposed_ms=lists_by_name(
            [
                {purpose: length(spans) for purpose, spans in by_purpose.items()}
                for by_purpose in exposed_spans
            ]
        ),
        purpose_exposed_waiting_ms=None if isinstance(waiting, str) else waiting.exposed_ms,
    )


def _causal_areas(cell: Cell, reports: Sequence[RankReport]) -> list[int] | None:
    """Return the causal area of each rank, in one layer of one sequence; None if it is unknown."""
    if cell.data.packs:
        # If the documents section of one rank broke a rule, it was dropped from the reports of all ranks.
        sections = filter(None, (report.parts.get("documents") for report in reports))
        return [_mean_area(cell, section) for section in sections] or None
    if cell.strategy not in STRATEGIES or cell.layout not in LAYOUTS:
        return None
    return [causal_area(cell, rank % cell.sp_degree) for rank in range(len(reports))]


def _mean_area(cell: Cell, documents: DocumentsSection) -> int:
    """Return one rank's causal area in a sequence, the mean over the sequences of all timed steps."""
    (area_by_step,) = documents.area
    return sum(area_by_step) // (len(area_by_step) * cell.batch * cell.grad_accum)


FACTS = TraceFacts()
