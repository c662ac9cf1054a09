"""The ranks' reports as the sections of a record: lists by rank, nothing reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.config import RunConfig
from bench.passes.trace.merge import merge_traces
from bench.record import AttentionCalls, Engagement, Losses, Memory, Parity, Telemetry, Timing

Report = dict[str, Any]
"""What one rank has to say once it has run all passes."""


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
