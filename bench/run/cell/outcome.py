"""Make the record of a cell from the ends of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import convert, to_builtins
from msgspec.structs import replace

from bench.common.environment import Environment, describe_environment
from bench.common.finite import find_not_finite
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
from bench.measure import (
    Sections,
    checks,
    decode_reports,
    evidence_sections,
    first_failure,
    merge_reports,
    own_work_s,
)
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

SWEEP_ENVIRONMENT = ("packages", "strategy_package", "argv")
"""Environment entries that are the same on all machines of a sweep."""
NODE_NAMES = ("host", "address")
"""Entries of a node's environment that name the node."""


def record_of(
    planned: PlannedCell,
    ends: Sequence[RankEnd],
    wall_s: float,
    started_at: datetime,
    shared_sections: Sections,
) -> Record:
    """Return the record of a cell whose ranks have ended.

    `shared_sections` are sections of earlier cells, which these ranks did not measure again.
    """
    cluster = planned.cell.cluster
    status, failure = classify(ends, limited=cluster.memory_limit_gib is not None and cluster.device == "cpu")
    if failure is not None:
        return failure_record(planned, status, failure, wall_s, started_at)
    reports = decode_reports([end.report for end in ends if end.report is not None])
    sections = merge_reports(reports, planned.cell, shared_sections)
    wrong = first_failure(planned.cell, sections) or first_rank_flaw(reports, planned.cell.running_ranks)
    record = completed_record(
        planned, reports, sections, checks(planned.cell, sections), wrong, wall_s, started_at
    )
    phases_s = worst_by_name([report.phases_s for report in reports])
    fixed_cost_s = wall_s - max(map(own_work_s, reports)) if record.status is Status.OK else None
    return replace(record, phases_s=phases_s, fixed_cost_s=fixed_cost_s)


def unsupported_record(
    planned: PlannedCell, reason: str, wall_s: float, started_at: datetime | None = None
) -> Record:
    """Return the record of a cell that is not supported, with the reason."""
    return new_record(planned, Status.UNSUPPORTED, reason, wall_s, started_at)


def failure_record(
    planned: PlannedCell, status: Status, failure: Failure, wall_s: float, started_at: datetime
) -> Record:
    """Return the record of a cell that failed before its end."""
    phase = " ".join(filter(None, (failure.phase, failure.step_phase))) or "unknown phase"
    on_node = "" if failure.node is None else f" on {failure.node}"
    reason = (
        f"rank {failure.rank}{on_node}, {phase}: {_failure_text(status, failure).strip() or failure.kind}"
    )
    return new_record(planned, status, reason.splitlines()[0], wall_s, started_at, failure=failure)


def completed_record(
    planned: PlannedCell,
    reports: Sequence[RankReport],
    sections: Sections,
    made: Sequence[Check],
    wrong: str | None,
    wall_s: float,
    started_at: datetime,
) -> Record:
    """Return the record of a cell that ran to its end; a wrong result has no speed.

    `sections` are merged over all ranks; a number in them that is not finite makes the result wrong. `made`
    are the checks of all sections. `wrong` is the message of the first gate that finds the result wrong; None
    if every gate passed. Some versions of the software that ran are known only from `reports`.
    """
    if wrong is None:
        wrong = _first_not_finite(sections)
    status, kept = (
        (Status.OK, sections) if wrong is None else (Status.WRONG_RESULT, evidence_sections(sections))
    )
    record = new_record(planned, status, wrong, wall_s, started_at, sections=kept, made=made)
    return replace(record, environment=replace(record.environment, **reports[0].software))


def with_node_environments(record: Record, nodes: Sequence[Mapping[str, Any]]) -> Record:
    """Return the record with the environment of the first node, and every node's differences from it.

    Software does not differ: a node with other versions is refused when it connects.
    """
    launcher = to_builtins(record.environment)
    of_sweep = {name: launcher[name] for name in SWEEP_ENVIRONMENT if name in launcher}
    of_machine = [
        {name: value for name, value in node.items() if name not in SWEEP_ENVIRONMENT} for node in nodes
    ]
    first = {name: value for name, value in of_machine[0].items() if name not in NODE_NAMES}
    by_node = [
        {name: value for name, value in node.items() if name in NODE_NAMES or first.get(name) != value}
        for node in of_machine
    ]
    return replace(record, environment=convert({**first, **of_sweep, "nodes": by_node}, Environment))


def as_wrong_result(record: Record, reason: str) -> Record:
    """Return the record with status `wrong_result`, with its checks and without its speed."""
    kept = dict.fromkeys(record.sections) | evidence_sections(record.sections)
    return replace(record, status=Status.WRONG_RESULT, reason=reason, fixed_cost_s=None, **kept)


def first_rank_flaw(reports: Sequence[RankReport], ranks: Sequence[int]) -> str | None:
    """Return the first flaw in the reports of these ranks, in one line, or None if there is none.

    Merged sections may hide a rank's flaw, as merging keeps only the largest of some numbers and only rank
    0's of others.
    """
    pairs = zip(ranks, reports, strict=True)
    return next((f"rank {rank}: {report.flaw}" for rank, report in pairs if report.flaw is not None), None)


def _first_not_finite(parts: Mapping[str, Any]) -> str | None:
    """Return a line on the first number that is not finite, with place and value; None if all are finite."""
    places = (place for name, part in parts.items() for place in find_not_finite(part, name))
    return next((f"{place}, which is no finite number" for place in places), None)


def _failure_text(status: Status, failure: Failure) -> str:
    if failure.out_of_memory is not None:
        return shortage(failure.out_of_memory, failure.message)
    # The message of some exceptions means nothing without the name of the class.
    return f"{failure.kind}: {failure.message}" if status is Status.ERROR else failure.message


def new_record(
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
    """Return a record of a cell, with the provenance of the cell's mode.

    `reason` says why the cell has no valid result; it is None if it has one. `made` are the checks of its
    sections. The cell took `wall_s` seconds from `started_at`, by default now.
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
        environment=describe_environment(STRATEGIES.packages(cell.strategy)),
        analytic=analytic(cell, sections, planned.need),
        started_at=(started_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        wall_s=wall_s,
        fixed_cost_s=None,
        failure=failure,
        checks=None if made is None else [*made],
        **(sections or {}),
    )


def analytic(cell: Cell, sections: Sections | None = None, need: MemoryNeed | None = None) -> Analytic:
    """Return the numbers of one step that follow from the cell's configuration.

    They are the FLOPs of all ranks together, and for one rank the bytes of attention communication, the
    payload by purpose and the needed memory. FLOPs of packed documents are those of the mean timed step, or
    None if no rank counted its documents. Bytes are None for a strategy that is not in STRATEGIES.
    """
    facts, payload_bytes = STRATEGIES.get(cell.strategy), payload(cell)
    flops: dict[str, Any] = ANALYTIC_FLOPS[cell.workload.name](cell, (sections or {}).get("documents"))
    return Analytic(
        tokens_per_step=cell.tokens_per_step,
        attention_bytes=None if facts is None else facts.communication_bytes(cell),
        payload_bytes=None if payload_bytes is None else {**payload_bytes},
        needed_bytes=None if need is None else need.total_bytes,
        **flops,
    )


def _training_flops(cell: Cell, packed: DocumentsSection | None) -> dict[str, int | None]:
    """Return model and hardware FLOPs of a training step on all ranks, causal and with full attention.

    Packed documents, also those of a loop, count their mean number of query-key pairs. The FLOPs are None if
    the cell packs documents and no rank counted them.
    """
    functions = {
        f"{name}_{'causal' if causal else 'full'}": (count, causal)
        for name, count in {"model_flops": model_flops, "hardware_flops": hardware_flops}.items()
        for causal in (True, False)
    }
    if cell.data.packs and packed is None:
        return dict.fromkeys(functions)
    pairs = None if packed is None else _mean_pairs(packed)
    return {name: count(cell, causal=causal, pairs=pairs) for name, (count, causal) in functions.items()}


def _mean_pairs(packed: DocumentsSection) -> CausalPairs:
    """Return the causal query-key pairs of the mean timed step."""
    steps = len(packed.pairs)
    return CausalPairs(sum(packed.pairs) // steps, sum(packed.computed_pairs) // steps)


def _attention_flops(cell: Cell, packed: DocumentsSection | None) -> dict[str, int | None]:  # noqa: ARG001
    """Return the FLOPs of one attention call, for the query-key pairs that the mask leaves."""
    causal = cell.workload.mask == "causal"
    return {
        "attention_forward_flops": attention_forward_flops(cell, causal=causal),
        "attention_backward_flops": attention_backward_flops(cell, causal=causal),
    }


ANALYTIC_FLOPS: Mapping[str, Callable[[Cell, DocumentsSection | None], dict[str, int | None]]] = {
    "train": _training_flops,
    "attention": _attention_flops,
}


def shortage(failed: OutOfMemory, message: str) -> str:
    """Return text such as `could not allocate 2.0 GiB of device memory, with 70.1 GiB allocated`.

    If the requested size is not known, the text begins with the first line of the error's `message`.
    """
    if failed.requested_bytes is None:
        text = message.strip().partition("\n")[0]
    else:
        text = f"could not allocate {size_label(failed.requested_bytes)} of {failed.memory} memory"
    if failed.allocated_bytes is None:
        return text
    of_limit = "" if failed.limit_bytes is None else f" of a limit of {size_label(failed.limit_bytes)}"
    would_fit = failed.allocated_bytes + (failed.requested_bytes or 0) <= (failed.limit_bytes or 0)
    afterwards = " after the failed operation had freed its memory" if would_fit else ""
    return f"{text}, with {size_label(failed.allocated_bytes)}{of_limit} allocated{afterwards}"


def outcome(record: Record) -> str:
    """Return the result of a cell in one line: its tokens per second, or its status and the reason.

    The speed is that of the slowest rank's median step. For a prediction, the line has a band instead of the
    number of samples; for a replay, it has the speed with and without the modelled time of the link.
    """
    timing = record.timing
    if record.status is not Status.OK or timing is None:
        return f"{record.status.value}: {record.reason}"
    rate = timing.tokens_per_step / slowest_median(timing.step_times_ms) * 1e3
    prediction = record.analytic.prediction
    if prediction is not None:
        step_ms = prediction.step_time_ms
        low, high = (timing.tokens_per_step / end_ms * 1e3 for end_ms in (step_ms.high, step_ms.low))
        return f"{rate:,.0f} tokens/s predicted ({low:,.0f} to {high:,.0f})"
    n = f"n={len(timing.step_times_ms[0])}"
    if record.provenance is Provenance.REPLAYED:
        with_link = rate_with_link(rate, timing.tokens_per_step, record.analytic.link_ms)
        return f"{rate_range_label(with_link, rate)} tokens/s replayed, {n}"
    return f"{rate:,.0f} tokens/s, {n}"


def rate_with_link(tokens_per_s: float, tokens: int, link_ms: Mapping[str, Band] | None) -> float | None:
    """Return the speed of a replay if a step also took all of the link's time.

    Args:
        tokens_per_s: Speed without the link.
        tokens: Tokens of one step.
        link_ms: Modelled milliseconds of the link by purpose, of which the high ends count.

    Returns:
        Tokens per second, or None if `link_ms` is None.
    """
    if link_ms is None:
        return None
    return tokens / (tokens / tokens_per_s + sum(band.high for band in link_ms.values()) / 1e3)
