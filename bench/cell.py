"""One cell in, one record out, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config import RunConfig
from bench.cost.flops import (
    attention_backward_flops,
    attention_forward_flops,
    hardware_flops,
    model_flops,
)
from bench.environment import describe
from bench.gates import first_failure
from bench.launcher import Launcher, Tell
from bench.legality import refusal
from bench.measure.merge import merge_traces
from bench.rank_end import RankEnd, classify
from bench.rank_log import STEP_PHASES
from bench.record import (
    SCHEMA_VERSION,
    AttentionCalls,
    Engagement,
    Failure,
    Losses,
    Memory,
    Parity,
    Provenance,
    Record,
    Status,
    Telemetry,
    Timing,
)
from bench.strategies import STRATEGIES

if TYPE_CHECKING:
    from bench.worker import RankEntry

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell's place in a sweep: `repeat` counts from 0, `order` is when it runs."""

    cell: RunConfig
    repeat: int
    order: int

    @property
    def folder_name(self) -> str:
        return f"{self.cell.cell_id}-{self.repeat}"


def run(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    *,
    entry: RankEntry | None = None,
    tell: Tell = lambda _: None,
    known_parity: Parity | None = None,
) -> Record:
    """The record of one cell: `unsupported` without starting a rank where it is not legal.

    With `known_parity`, that of an equal cell, the check is not run again.
    """
    reason = refusal(planned.cell)
    if reason is not None:
        return _record(planned, Status.UNSUPPORTED, reason, wall_s=0.0)
    start = time.monotonic()
    started_at = datetime.now(UTC)
    try:
        ends = launcher.run(
            planned.cell,
            folder / planned.folder_name,
            entry=entry,
            tell=tell,
            parity_is_known=known_parity is not None,
        )
    except KeyboardInterrupt:
        interrupted = _record(planned, Status.INTERRUPTED, "interrupted", time.monotonic() - start)
        raise CellInterrupted(interrupted) from None
    return record_of(planned, ends, time.monotonic() - start, started_at, known_parity)


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C during a cell; carries the record that says so."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def record_of(
    planned: PlannedCell,
    ends: Sequence[RankEnd],
    wall_s: float,
    started_at: datetime,
    known_parity: Parity | None = None,
) -> Record:
    """The ranks' ends as one record."""
    status, failure = classify(ends, limited=planned.cell.cluster.memory_limit_gib is not None)
    if failure is not None:
        where = " ".join(filter(None, (failure.phase, failure.step_phase))) or "unknown phase"
        reason = f"rank {failure.rank}, {where}: {failure.message}"
        return _record(planned, status, _first_line(reason), wall_s, started_at, failure=failure)
    reports = [end.report for end in ends if end.report is not None]
    sections = merge(reports, planned.cell, known_parity)
    wrong = first_failure(planned.cell, sections)
    if wrong is not None:
        evidence = {name: sections[name] for name in ("parity", "engagement", "losses")}
        return _record(planned, Status.WRONG_RESULT, wrong, wall_s, started_at, **evidence)
    return _record(
        planned, Status.OK, None, wall_s, started_at, fixed_cost_s=fixed_cost_s(reports, wall_s), **sections
    )


def fixed_cost_s(reports: Sequence[Report], wall_s: float) -> float:
    """Seconds of a cell that are not its own steps: starting, joining, building, reporting, leaving."""
    own_work_s = [sum(report["phases_s"].get(phase, 0.0) for phase in STEP_PHASES) for report in reports]
    return float(wall_s - max(own_work_s))


def merge(reports: Sequence[Report], cell: RunConfig, known_parity: Parity | None = None) -> dict[str, Any]:
    """The ranks' reports as the record's sections: lists by rank, nothing reduced."""
    timings = [report["timing"] for report in reports]
    memories = [report["memory"] for report in reports]
    engagements = [report["engagement"] for report in reports]
    telemetries = [report["telemetry"] for report in reports]
    traces = [report["trace"] for report in reports if "trace" in report]
    return {
        "parity": known_parity or Parity(**reports[0]["parity"]),
        "engagement": Engagement(
            attention_name=engagements[0]["attention_name"],
            modules=engagements[0]["modules"],
            attention_shapes=_by_rank(engagements, "attention_shapes"),
            sent_bytes=_sent_bytes(_by_rank(engagements, "sent_bytes")),
            calls=engagements[0]["calls"],
        ),
        "timing": Timing(
            step_times_ms=_by_rank(timings, "step_times_ms"),
            window_ms=_by_rank(timings, "window_ms"),
            warmup=timings[0]["warmup"],
            tokens_per_step=cell.tokens_per_step,
        ),
        "losses": Losses(**reports[0]["losses"]) if "losses" in reports[0] else None,
        "attention": _merge_attention(reports),
        "memory": _merge_memories(memories, telemetries),
        "telemetry": _merge_telemetries(telemetries),
        "trace": merge_traces(traces, cell) if traces else None,
    }


def _merge_attention(reports: Sequence[Report]) -> AttentionCalls | None:
    """Times by rank; what rank 0 alone measured is rank 0's."""
    if "attention" not in reports[0]:
        return None
    calls = [report["attention"] for report in reports]
    by_rank = {name: _by_rank(calls, name) for name in ("forward_ms", "backward_ms")}
    return AttentionCalls(**calls[0] | by_rank)


def _merge_memories(memories: Sequence[Report], telemetries: Sequence[Report]) -> Memory:
    used = _known_by_rank(telemetries, "device_used_bytes")
    by_rank: dict[str, Any] = {key: _known_by_rank(memories, key) for key in memories[0]}
    return Memory(
        **by_rank,
        device_used_bytes=used and [round(max(samples)) for samples in used],
        device_used_reason=None if used else _reason(telemetries),
    )


def _merge_telemetries(telemetries: Sequence[Report]) -> Telemetry:
    own = ("reason", "throttled", "load_average", "device_used_bytes")
    held_back = [telemetry["throttled"] for telemetry in telemetries]
    by_rank: dict[str, Any] = {
        key: _known_by_rank(telemetries, key) for key in telemetries[0] if key not in own
    }
    return Telemetry(
        **by_rank,
        reason=_reason(telemetries),
        throttled=True if True in held_back else None if None in held_back else False,
        load_average=telemetries[0]["load_average"],
    )


def _reason(telemetries: Sequence[Report]) -> str | None:
    """Why figures are missing, each reason once."""
    reasons = dict.fromkeys(each["reason"] for each in telemetries if each["reason"] is not None)
    return "; ".join(reasons) or None


def _sent_bytes(per_rank: Sequence[dict[str, int]]) -> dict[str, list[int]]:
    purposes = sorted({purpose for sent in per_rank for purpose in sent})
    return {purpose: [sent.get(purpose, 0) for sent in per_rank] for purpose in purposes}


def _known_by_rank(parts: Sequence[Report], key: str) -> list[Any] | None:
    """Null, not a list of nulls, where no rank has the figure."""
    values = _by_rank(parts, key)
    return None if None in values else values


def _by_rank(parts: Sequence[Report], key: str) -> list[Any]:
    return [part[key] for part in parts]


def _record(
    planned: PlannedCell,
    status: Status,
    reason: str | None,
    wall_s: float,
    started_at: datetime | None = None,
    **sections: Any,
) -> Record:
    cell = planned.cell
    return Record(
        schema_version=SCHEMA_VERSION,
        cell_id=cell.cell_id,
        experiment=cell.experiment,
        role="cell",
        repeat=planned.repeat,
        order=planned.order,
        status=status,
        reason=reason,
        provenance=Provenance.MEASURED,
        config=cell.flat(),
        environment=describe(STRATEGIES.packages(cell.strategy)),
        analytic=analytic(cell),
        started_at=(started_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        wall_s=wall_s,
        fixed_cost_s=sections.pop("fixed_cost_s", None),
        **sections,
    )


def analytic(cell: RunConfig) -> dict[str, Any]:
    """What arithmetic says of one step: FLOPs of all ranks, exchange bytes of one."""
    return {
        "tokens_per_step": cell.tokens_per_step,
        **ANALYTIC_FLOPS[cell.workload.name](cell),
        "exchange_bytes": STRATEGIES[cell.strategy].exchange_bytes(cell),
    }


def _training_flops(cell: RunConfig) -> dict[str, int]:
    return {
        "model_flops_causal": model_flops(cell, causal=True),
        "model_flops_full": model_flops(cell, causal=False),
        "hardware_flops_causal": hardware_flops(cell, causal=True),
    }


def _attention_flops(cell: RunConfig) -> dict[str, int]:
    """Of one call, by the area that the mask leaves."""
    causal = cell.workload.mask == "causal"
    return {
        "attention_forward_flops": attention_forward_flops(cell, causal=causal),
        "attention_backward_flops": attention_backward_flops(cell, causal=causal),
    }


ANALYTIC_FLOPS: Mapping[str, Callable[[RunConfig], dict[str, int]]] = {
    "train": _training_flops,
    "attention": _attention_flops,
}


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else text


__all__ = ["CellInterrupted", "Failure", "PlannedCell", "analytic", "merge", "record_of", "run"]
