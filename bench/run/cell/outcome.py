"""From how a cell's ranks ended to its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import convert, to_builtins
from msgspec.structs import replace

from bench.common.environment import Environment, describe
from bench.common.finite import not_finite
from bench.common.labels import rate_range_label, size_label
from bench.common.statistics import slowest_median
from bench.config import Cell
from bench.cost.band import Band
from bench.cost.flops import (
    CausalPairs,
    attention_backward_flops,
    attention_forward_flops,
    hardware_flops,
    model_flops,
)
from bench.cost.memory import MemoryNeed
from bench.cost.traffic import payload
from bench.measure import Sections, checks, decoded, evidence, first_failure, merge, own_work_s
from bench.measure.check import Check
from bench.measure.documents.section import DocumentsSection
from bench.measure.facts import RankReport, worst_by_name
from bench.plan.planned import PlannedCell
from bench.record.analytic import Analytic
from bench.record.record import Failure, OutOfMemory, Provenance, Record, Status
from bench.request.modes import mode_of
from bench.run.cell.ends import classify
from bench.run.node.ranks import RankEnd
from bench.strategies import STRATEGIES

OF_SWEEP = ("packages", "strategy_package", "argv")
"""Of an environment what holds of the whole sweep, whatever machine its launcher is on."""
NAMES_OF_NODE = ("host", "address")


def record_of(
    planned: PlannedCell,
    ends: Sequence[RankEnd],
    wall_s: float,
    started_at: datetime,
    known: Sections,
) -> Record:
    """The ranks' ends as one record; `known` are sections of an equal cell that were not measured again."""
    cluster = planned.cell.cluster
    status, failure = classify(ends, limited=cluster.memory_limit_gib is not None and cluster.device == "cpu")
    if failure is not None:
        return failed(planned, status, failure, wall_s, started_at)
    reports = decoded([end.report for end in ends if end.report is not None])
    sections = merge(reports, planned.cell, known)
    wrong = first_failure(planned.cell, sections) or flaw_of_a_rank(reports, planned.cell.running_ranks)
    record = judged(planned, reports, sections, checks(planned.cell, sections), wrong, wall_s, started_at)
    phases_s = worst_by_name([report.phases_s for report in reports])
    fixed_cost_s = wall_s - max(map(own_work_s, reports)) if record.status is Status.OK else None
    return replace(record, phases_s=phases_s, fixed_cost_s=fixed_cost_s)


def refused(planned: PlannedCell, reason: str, wall_s: float, started_at: datetime | None = None) -> Record:
    """The record of a cell that is not supported."""
    return record_with(planned, Status.UNSUPPORTED, reason, wall_s, started_at)


def failed(
    planned: PlannedCell, status: Status, failure: Failure, wall_s: float, started_at: datetime
) -> Record:
    """The record of a cell that did not reach its end."""
    where = " ".join(filter(None, (failure.phase, failure.step_phase))) or "unknown phase"
    on_node = "" if failure.node is None else f" on {failure.node}"
    reason = f"rank {failure.rank}{on_node}, {where}: {_what(status, failure).strip() or failure.kind}"
    return record_with(planned, status, reason.splitlines()[0], wall_s, started_at, failure=failure)


def judged(
    planned: PlannedCell,
    reports: Sequence[RankReport],
    sections: Sections,
    made: Sequence[Check],
    wrong: str | None,
    wall_s: float,
    started_at: datetime,
) -> Record:
    """Return the record of a cell that ran to its end: where something is wrong, without any speed.

    `made` are the checks of all sections, `wrong` is what a gate found; a number that is not finite is wrong
    in any section. Only the reports of the ranks say all of the software that ran.
    """
    if wrong is None:
        wrong = _first_not_finite(sections)
    status, kept = (Status.OK, sections) if wrong is None else (Status.WRONG_RESULT, evidence(sections))
    record = record_with(planned, status, wrong, wall_s, started_at, sections=kept, made=made)
    return replace(record, environment=replace(record.environment, **reports[0].software))


def on_nodes(record: Record, nodes: Sequence[Mapping[str, Any]]) -> Record:
    """Return the record where ranks ran on other machines: its environment is the first one's, and by node
    what differs from that.

    Software is the same on all, or they would not have been taken in.
    """
    own = to_builtins(record.environment)
    of_sweep = {name: own[name] for name in OF_SWEEP if name in own}
    of_machine = [{name: value for name, value in node.items() if name not in OF_SWEEP} for node in nodes]
    first = {name: value for name, value in of_machine[0].items() if name not in NAMES_OF_NODE}
    by_node = [
        {name: value for name, value in node.items() if name in NAMES_OF_NODE or first.get(name) != value}
        for node in of_machine
    ]
    return replace(record, environment=convert({**first, **of_sweep, "nodes": by_node}, Environment))


def as_wrong_result(record: Record, reason: str) -> Record:
    """The same record once its result turned out to be wrong: without any speed, its checks as they were."""
    kept = dict.fromkeys(record.sections) | evidence(record.sections)
    return replace(record, status=Status.WRONG_RESULT, reason=reason, fixed_cost_s=None, **kept)


def flaw_of_a_rank(reports: Sequence[RankReport], ranks: Sequence[int]) -> str | None:
    """Return the first flaw of any of these ranks, in one line; None without one.

    Sections need not show it: merging takes the largest of some numbers and only rank 0's of others.
    """
    found = zip(ranks, reports, strict=True)
    return next((f"rank {rank}: {report.flaw}" for rank, report in found if report.flaw is not None), None)


def _first_not_finite(parts: Mapping[str, Any]) -> str | None:
    """Return where in these sections, or a rank's parts of them, the first number is not finite."""
    places = (place for name, part in parts.items() for place in not_finite(part, name))
    return next((f"{place}, which is no finite number" for place in places), None)


def _what(status: Status, failure: Failure) -> str:
    if failure.out_of_memory is not None:
        return shortage(failure.out_of_memory, failure.message)
    # The message of an exception may say little without its class.
    return f"{failure.kind}: {failure.message}" if status is Status.ERROR else failure.message


def record_with(
    planned: PlannedCell,
    status: Status,
    reason: str | None,
    wall_s: float = 0.0,
    started_at: datetime | None = None,
    *,
    sections: Sections | None = None,
    failure: Failure | None = None,
    made: Sequence[Check] | None = None,
) -> Record:
    """The record of a cell that came to this; its provenance is that of the cell's mode.

    `made` are checks that were made, None where none could be.
    """
    cell = planned.cell
    return Record(
        cell_id=cell.cell_id,
        experiment=cell.experiment,
        role=planned.role,
        repeat=planned.repeat,
        order=planned.order,
        status=status,
        reason=reason,
        provenance=mode_of(cell).provenance,
        config=cell.flat(),
        environment=describe(STRATEGIES.packages(cell.strategy)),
        analytic=analytic(cell, sections, planned.need),
        started_at=(started_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        wall_s=wall_s,
        fixed_cost_s=None,
        failure=failure,
        checks=None if made is None else [*made],
        **(sections or {}),
    )


def analytic(cell: Cell, sections: Sections | None = None, need: MemoryNeed | None = None) -> Analytic:
    """Return what arithmetic says of one step: FLOPs of all ranks, bytes that one exchanges and needs.

    FLOPs of packed documents are those of the mean step, unknown where no rank counted any. Bytes are unknown
    of a strategy that is not in the table.
    """
    facts, sent = STRATEGIES.get(cell.strategy), payload(cell)
    flops: dict[str, Any] = ANALYTIC_FLOPS[cell.workload.name](cell, (sections or {}).get("documents"))
    return Analytic(
        tokens_per_step=cell.tokens_per_step,
        attention_bytes=None if facts is None else facts.communication_bytes(cell),
        payload_bytes=None if sent is None else {**sent},
        needed_bytes=None if need is None else need.total,
        **flops,
    )


def _training_flops(cell: Cell, packed: DocumentsSection | None) -> dict[str, int | None]:
    counted = {
        f"{name}_{'causal' if causal else 'full'}": (count, causal)
        for name, count in {"model_flops": model_flops, "hardware_flops": hardware_flops}.items()
        for causal in (True, False)
    }
    if cell.data.packs and packed is None:
        return dict.fromkeys(counted)
    pairs = None if packed is None else _mean_pairs(packed)
    return {name: count(cell, causal=causal, pairs=pairs) for name, (count, causal) in counted.items()}


def _mean_pairs(packed: DocumentsSection) -> CausalPairs:
    """Those of the mean step."""
    steps = len(packed.pairs)
    return CausalPairs(sum(packed.pairs) // steps, sum(packed.computed_pairs) // steps)


def _attention_flops(cell: Cell, packed: DocumentsSection | None) -> dict[str, int | None]:  # noqa: ARG001
    """Of one call, by the area that the mask leaves."""
    causal = cell.workload.mask == "causal"
    return {
        "attention_forward_flops": attention_forward_flops(cell, causal=causal),
        "attention_backward_flops": attention_backward_flops(cell, causal=causal),
    }


ANALYTIC_FLOPS: Mapping[str, Callable[[Cell, DocumentsSection | None], dict[str, int | None]]] = {
    "train": _training_flops,
    "attention": _attention_flops,
}


def shortage(found: OutOfMemory, said: str) -> str:
    """`no room for 2.0 GiB more of device memory, with 70.1 GiB held`.

    What the error `said` stands for the first half where it gives no size.
    """
    if found.requested_bytes is None:
        what = said.strip().partition("\n")[0]
    else:
        what = f"no room for {size_label(found.requested_bytes)} more of {found.memory} memory"
    if found.allocated_bytes is None:
        return what
    of_limit = "" if found.limit_bytes is None else f" of a limit of {size_label(found.limit_bytes)}"
    had_room = found.allocated_bytes + (found.requested_bytes or 0) <= (found.limit_bytes or 0)
    since = " once the failed operation had let go of its own" if had_room else ""
    return f"{what}, with {size_label(found.allocated_bytes)} held{of_limit}{since}"


def outcome(record: Record) -> str:
    """Tokens per second of the slowest rank's median step, or what went wrong and why.

    Of a prediction with its band, as it has no samples, and of a replay with and without the link's time.
    """
    timing = record.timing
    if record.status is not Status.OK or timing is None:
        return f"{record.status.value}: {record.reason}"
    rate = timing.tokens_per_step / slowest_median(timing.step_times_ms) * 1e3
    prediction = record.analytic.prediction
    if prediction is not None:
        ends_ms = prediction.step_time_ms.high, prediction.step_time_ms.low
        low, high = (timing.tokens_per_step / end_ms * 1e3 for end_ms in ends_ms)
        return f"{rate:,.0f} tokens/s predicted ({low:,.0f} to {high:,.0f})"
    n = f"n={len(timing.step_times_ms[0])}"
    if record.provenance is Provenance.REPLAYED:
        with_link = rate_with_link(rate, timing.tokens_per_step, record.analytic.link_ms)
        return f"{rate_range_label(with_link, rate)} tokens/s replayed, {n}"
    return f"{rate:,.0f} tokens/s, {n}"


def rate_with_link(tokens_per_s: float, tokens: int, link_ms: Mapping[str, Band] | None) -> float | None:
    """Tokens/s where all of the link's time, at its high end, comes on top of a step of so many tokens."""
    if link_ms is None:
        return None
    return tokens / (tokens / tokens_per_s + sum(each.high for each in link_ms.values()) / 1e3)
