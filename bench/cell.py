"""One cell in, one record out, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config import RunConfig
from bench.cost.flops import hardware_flops, model_flops
from bench.environment import describe
from bench.gates import first_failure
from bench.launcher import Launcher, Tell
from bench.legality import refusal
from bench.measure.merge import merge_traces
from bench.rank_end import RankEnd, classify
from bench.rank_log import STEP_PHASES
from bench.record import (
    SCHEMA_VERSION,
    Engagement,
    Failure,
    Losses,
    Memory,
    Parity,
    Provenance,
    Record,
    Status,
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
) -> Record:
    """The record of one cell: `unsupported` without starting a rank where it is not legal."""
    reason = refusal(planned.cell)
    if reason is not None:
        return _record(planned, Status.UNSUPPORTED, reason, wall_s=0.0)
    start = time.monotonic()
    started_at = datetime.now(UTC)
    try:
        ends = launcher.run(planned.cell, folder / planned.folder_name, entry=entry, tell=tell)
    except KeyboardInterrupt:
        interrupted = _record(planned, Status.INTERRUPTED, "interrupted", time.monotonic() - start)
        raise CellInterrupted(interrupted) from None
    return record_of(planned, ends, time.monotonic() - start, started_at)


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C during a cell; carries the record that says so."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def record_of(planned: PlannedCell, ends: Sequence[RankEnd], wall_s: float, started_at: datetime) -> Record:
    """The ranks' ends as one record."""
    status, failure = classify(ends)
    if failure is not None:
        reason = f"rank {failure.rank}, {failure.phase or 'unknown phase'}: {failure.message}"
        return _record(planned, status, _first_line(reason), wall_s, started_at, failure=failure)
    reports = [end.report for end in ends if end.report is not None]
    sections = merge(reports, planned.cell)
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


def merge(reports: Sequence[Report], cell: RunConfig) -> dict[str, Any]:
    """The ranks' reports as the record's sections: lists by rank, nothing reduced."""
    timings = [report["timing"] for report in reports]
    memories = [report["memory"] for report in reports]
    engagements = [report["engagement"] for report in reports]
    traces = [report["trace"] for report in reports if "trace" in report]
    return {
        "parity": Parity(**reports[0]["parity"]),
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
        "losses": Losses(**reports[0]["losses"]),
        "memory": Memory(
            peak_allocated_bytes=_known_by_rank(memories, "peak_allocated_bytes"),
            peak_reserved_bytes=_known_by_rank(memories, "peak_reserved_bytes"),
            peak_resident_bytes=_by_rank(memories, "peak_resident_bytes"),
            base_resident_bytes=_by_rank(memories, "base_resident_bytes"),
        ),
        "trace": merge_traces(traces, cell) if traces else None,
    }


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
        environment=describe(),
        analytic=analytic(cell),
        started_at=(started_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        wall_s=wall_s,
        fixed_cost_s=sections.pop("fixed_cost_s", None),
        **sections,
    )


def analytic(cell: RunConfig) -> dict[str, Any]:
    """What arithmetic says of one optimizer step: FLOPs of all ranks, exchange bytes of one."""
    return {
        "tokens_per_step": cell.tokens_per_step,
        "model_flops_causal": model_flops(cell, causal=True),
        "model_flops_full": model_flops(cell, causal=False),
        "hardware_flops_causal": hardware_flops(cell, causal=True),
        "exchange_bytes": STRATEGIES[cell.strategy].exchange_bytes(cell),
    }


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else text


__all__ = ["CellInterrupted", "Failure", "PlannedCell", "analytic", "merge", "record_of", "run"]
