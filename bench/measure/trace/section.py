"""Where a step's time went: the trace pass without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bench.attention.layouts import LAYOUTS
from bench.common.rules import Amount, PerRank, Positive, Times, check_lengths
from bench.config import OWN, Cell, MeasureConfig
from bench.cost.flops import causal_area
from bench.measure.check import Check
from bench.measure.documents.section import DocumentsSection
from bench.measure.engagement.section import will_share_traced_step
from bench.measure.facts import NOT_RUN, Moment, PassFacts, RankReport, by_name, by_rank
from bench.measure.trace.intervals import length
from bench.measure.trace.split import Split
from bench.measure.trace.timeline import COMPUTE_PARTS
from bench.measure.trace.waiting import RankTrace, clock_bound_us, waiting
from bench.ranks.log import RankStage
from bench.strategies import STRATEGIES

TRACED_STEPS = 5
"""At the most: a single step of a few milliseconds says little on a machine with neighbours."""
TRACED_PART = 0.5
"""Of `measure.budget_s`, which the timed steps fill: at the most so much again goes into traced ones."""

ONLY_WHILE_INSPECTED = "what was inspected and checked is not what runs when nobody looks"
BY_NAME = ("communication_ms", "calls", "purpose_total_ms", "compute_ms", "copies_ms")
"""What a rank's split has by kind, purpose or part."""
OF_ALL_RANKS = "Expected values of equally many ranks"
INSPECTED = "the only traced step was the inspected one"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """One rank's traced steps in the order in which they ran."""

    steps: list[RankTrace]
    median: int
    """Which of them is of median length, by its slowest rank; all ranks agree."""
    is_inspected: bool = False
    """Whether there is one alone, which was the inspected step too; all ranks agree."""
    failure: str | None = None
    """Why this rank has none: what the profiler said, or the reader of its trace."""


class TracedStep(Struct, frozen=True, kw_only=True):
    """One of several traced steps, by rank, in milliseconds."""

    step_ms: Times
    purpose_exposed_ms: dict[str, PerRank]
    """By purpose and rank, in flight without compute on that rank."""
    purpose_exposed_waiting_ms: dict[str, PerRank] | None
    """The part of it in which the last rank had not arrived yet; null where that is not known."""
    call_differences: list[str | None]
    """What a rank called more or less often than in the inspected step; null where it made the same calls."""

    def __post_init__(self) -> None:
        waiting_ms = self.purpose_exposed_waiting_ms or {}
        check_lengths(OF_ALL_RANKS, self.step_ms, *self.purpose_exposed_ms.values(), *waiting_ms.values())


class TraceSection(Struct, frozen=True, kw_only=True):
    """Steps under torch.profiler, per rank, in milliseconds. Intervals are merged, never summed.

    All but `steps` is of the one of median length.

    Each instant is booked once: `compute_ms`, `purpose_exposed_ms`, `copies_ms` and `idle_ms` add up to
    `step_ms`. A purpose is attention, parameters, gradients, data_and_loss or other.
    """

    step_ms: list[Positive] = []
    """The traced step by rank: the denominator of shares. Empty, as all else, where there is a `failure`."""
    total_ms: list[Amount] = []
    """By rank the union of all communication's intervals."""
    exposed_ms: list[Amount] = []
    """The part of it without compute on that rank. A send or receive in flight behind compute counts in
    total, not in exposed."""
    communication_ms: dict[str, list[float]] = {}
    """By kind and rank the union of that kind's intervals."""
    calls: dict[str, list[int]] = {}
    """By kind and rank."""
    purpose_total_ms: dict[str, PerRank] = {}
    """By purpose and rank, in flight."""
    purpose_exposed_ms: dict[str, PerRank] = {}
    """By purpose and rank, exposed."""
    purpose_waiting_ms: dict[str, PerRank] | None = None
    """The latest arrival of the ranks that had to meet minus one's own; null where the ranks' clocks or calls
    cannot be compared, for the reason in `waiting_unknown`."""
    purpose_exposed_waiting_ms: dict[str, PerRank] | None = None
    """The exposed part of that."""
    compute_ms: dict[str, PerRank] | None = None
    """By part and rank: `attention` is its kernels and arithmetic, `packing` the copies and conversions in
    attention, `optimizer` clipping and the update, `other` the rest; null with a `failure`."""
    idle_ms: PerRank | None = None
    causal_area: list[int] | None = None
    """By rank the (query, key, head) triples that the mask leaves it, of one sequence and layer, the mean one
    where documents are packed; null where it is not known how a strategy shares them."""
    purposes_unknown: list[str | None] = []
    """By rank why purposes are unknown."""
    steps: list[TracedStep] = []
    """Every traced step, in the order in which they ran."""
    median_step: int = 0
    """Which of `steps` all the other fields are of, from 0; the trace that is kept is of it too."""
    is_inspected: bool = False
    """Whether the only traced step was the inspected one too, for want of time."""
    clock_bound_us: float | None = None
    """By how much the comparison of clocks between hosts may be wrong, on the worst rank: lateness below
    that counts as none. Null where all ranks read one clock."""
    waiting_unknown: str | None = None
    """Why waiting is null."""
    copies_ms: dict[str, PerRank] = {}
    """By part and rank what a GPU copied or filled without a kernel and neither compute nor communication
    covers: `packing` in attention, `optimizer`, `other`. Empty on a CPU."""
    torch_attention: list[str] | None = None
    """Operators of torch's `scaled_dot_product_attention` that the step ran: a training stack leaves the
    choice to torch, which may take cuDNN where the cell says `torch_flash`."""
    failure: str | None = None
    """Why nothing is known of any traced step: on which rank the profiler failed, or its trace is no good."""

    def __post_init__(self) -> None:
        if self.failure is not None:
            return
        if not (self.step_ms and self.total_ms and self.exposed_ms):
            raise ValueError("a trace without a failure needs times of every rank")
        if self.compute_ms is not None and not self.compute_ms.keys() >= {*COMPUTE_PARTS}:
            raise ValueError(f"Expected compute_ms with {', '.join(COMPUTE_PARTS)}")
        by_name = (
            self.purpose_total_ms, self.purpose_exposed_ms, self.purpose_exposed_waiting_ms, self.compute_ms,
            self.copies_ms,
        )  # fmt: skip
        named = [per_rank for each in by_name for per_rank in (each or {}).values()]
        check_lengths(
            OF_ALL_RANKS,
            self.step_ms,
            self.total_ms,
            self.exposed_ms,
            self.idle_ms,
            self.purposes_unknown or None,
            *named,
        )


class TraceFacts(PassFacts[RankSteps, TraceSection]):
    name = "trace"
    part = RankSteps
    needs_all_ranks = True
    judges = Moment.INSPECTED_STEP

    def is_asked(self, measure: MeasureConfig) -> bool:
        return measure.trace

    def stages(self, measure: MeasureConfig, step_s: float) -> list[RankStage]:
        shares = will_share_traced_step(measure, step_s)
        return [RankStage("trace", steps=1 if shares else traced_steps(measure, step_s))]

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> TraceSection:
        """Waiting needs the arrivals of all ranks, so it is found here."""
        ranks = self.parts(reports)
        failed = next((rank for rank, part in enumerate(ranks) if part.failure is not None), None)
        if failed is not None:
            return TraceSection(failure=f"rank {failed}: {ranks[failed].failure}")
        steps = [*zip(*(rank.steps for rank in ranks), strict=True)]
        median = ranks[0].median
        traces, kept = steps[median], [*map(_traced_step, steps)]
        splits: Sequence[Split] = [trace.split for trace in traces]
        found = waiting(traces)
        times: dict[str, Any] = {
            name: by_rank(splits, name) for name in ("step_ms", "total_ms", "exposed_ms", "idle_ms")
        }
        times |= {name: by_name(by_rank(splits, name)) for name in BY_NAME}
        return TraceSection(
            **times,
            purpose_exposed_ms=kept[median].purpose_exposed_ms,
            purpose_waiting_ms=None if isinstance(found, str) else found.waiting_ms,
            purpose_exposed_waiting_ms=kept[median].purpose_exposed_waiting_ms,
            causal_area=_areas(cell, reports),
            purposes_unknown=by_rank(traces, "purposes_unknown"),
            steps=kept,
            median_step=median,
            is_inspected=ranks[0].is_inspected,
            clock_bound_us=clock_bound_us(traces),
            waiting_unknown=found if isinstance(found, str) else None,
            torch_attention=traces[0].torch_attention,
        )

    def gate(self, cell: Cell, section: TraceSection) -> str | None:
        """Nobody looked on from inside, and the ranks called what they called when somebody did.

        Somebody's own loop may do other things every few steps, so of one this is only noted.
        """
        if cell.trainer == OWN:
            return None
        for number, step in enumerate(section.steps):
            for rank, difference in enumerate(step.call_differences):
                if difference is not None:
                    return f"rank {rank}, traced step {number}: {difference}; {ONLY_WHILE_INSPECTED}"
        return None

    def checks(self, cell: Cell, section: TraceSection | None) -> list[Check]:
        """The collectives that ran while nobody looked on from inside.

        A step whose calls could not be told apart counts as not compared, and so do the others then.
        """
        check = Check(what="collective calls of traced steps", against="the inspected step")
        if section is None:
            return [replace(check, reason=NOT_RUN if cell.measure.trace else "measure.trace=false")]
        differences = [next(filter(None, step.call_differences), None) for step in section.steps]
        purposes_unknown = (
            INSPECTED if section.is_inspected else next(filter(None, section.purposes_unknown), None)
        )
        unknown = section.failure or purposes_unknown
        equal = 0 if unknown else differences.count(None)
        reason = unknown or next(filter(None, differences), None)
        traced = len(section.steps)
        return [replace(check, tokens=cell.seq_len, steps=equal, of_steps=traced, reason=reason)]


def traced_steps(measure: MeasureConfig, step_s: float) -> int:
    """Steps to trace where one takes `step_s` seconds: at least one, at most TRACED_STEPS."""
    if measure.budget_s == 0:
        return TRACED_STEPS
    return max(1, min(TRACED_STEPS, int(TRACED_PART * measure.budget_s / step_s)))


def _traced_step(traces: Sequence[RankTrace]) -> TracedStep:
    found = waiting(traces)
    exposed = [trace.split.exposed_spans_ms for trace in traces]
    return TracedStep(
        step_ms=by_rank([trace.split for trace in traces], "step_ms"),
        purpose_exposed_ms=by_name(
            [{purpose: length(spans) for purpose, spans in each.items()} for each in exposed]
        ),
        purpose_exposed_waiting_ms=None if isinstance(found, str) else found.exposed_ms,
        call_differences=by_rank(traces, "call_differences"),
    )


def _areas(cell: Cell, reports: Sequence[RankReport]) -> list[int] | None:
    if cell.data.packs:
        # The documents of all ranks are missing where those of one broke the rules of their section.
        packed = filter(None, (report.parts.get("documents") for report in reports))
        return [_mean_area(cell, each) for each in packed] or None
    known = cell.strategy in STRATEGIES and cell.layout in LAYOUTS
    return [causal_area(cell, rank % cell.sp_degree) for rank in range(len(reports))] if known else None


def _mean_area(cell: Cell, packed: DocumentsSection) -> int:
    """Return the mean of the sequences that the rank has a part of, over all full-length steps."""
    (area,) = packed.area
    return sum(area) // (len(area) * cell.batch * cell.grad_accum)


FACTS = TraceFacts()
