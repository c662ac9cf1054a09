"""From one record's raw samples to numbers. Every function is pure; what was not measured is None."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from analysis.attention_calls import AttentionMetrics, attention_metrics
from analysis.stability import load_note, step_notes
from analysis.step_parts import part_columns
from bench.median import median_interval

MAX_TRACED_TO_TIMED = 1.2
"""Above this the profiler slowed the step too much for its shares to describe the timed one."""

UNJOINED = "communication by purpose unknown: the traced step made other calls than the inspected one"

PEAK_DTYPES = frozenset({"bf16", "fp16"})
"""`peak_flops_per_s` in conf/hardware is the dense 16-bit figure, so MFU exists for these only."""


PEAKS = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "whole_life_allocated_bytes",
    "device_used_bytes",
)  # fmt: skip
"""The memory section's figures per rank, of which the worst rank's is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Communication of one traced step as a fraction of that step: the worst rank's, each by itself."""

    total: float
    exposed: float


class Metrics(AttentionMetrics, frozen=True, kw_only=True):
    """One record's numbers, named with their unit. Times are of the slowest rank, memory of the worst."""

    n_steps: int | None = None
    warmup: str | None = None
    tokens_per_step: int | None = None
    step_time_ms: float | None = None
    step_time_low_ms: float | None = None
    step_time_high_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    tokens_per_s_per_rank: float | None = None
    window_tokens_per_s: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resident_bytes: int | None = None
    resident_above_base_bytes: int | None = None
    whole_life_allocated_bytes: int | None = None
    device_used_bytes: int | None = None
    communication_share: float | None = None
    exposed_communication_share: float | None = None
    attention_exchange_share: float | None = None
    exposed_attention_exchange_share: float | None = None
    traced_to_timed: float | None = None
    straggler_gap_ms: float | None = None
    mfu_causal: float | None = None
    mfu_full: float | None = None
    hfu_causal: float | None = None
    hfu_full: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    note: str | None = None
    part_attention_ms: float | None = None
    part_imbalance_ms: float | None = None
    part_packing_ms: float | None = None
    part_transfer_ms: float | None = None
    part_waiting_ms: float | None = None
    part_model_state_ms: float | None = None
    part_other_exchange_ms: float | None = None
    part_optimizer_ms: float | None = None
    part_other_compute_ms: float | None = None
    part_idle_ms: float | None = None


def slowest_rank_ms(step_times_ms: Sequence[Sequence[float]]) -> list[float]:
    """Per step the slowest rank's time in ms, from `step_times_ms[rank][step]`."""
    return [*map(max, *step_times_ms)] if len(step_times_ms) > 1 else [*chain(*step_times_ms)]


def tokens_per_s(tokens: float, time_ms: float) -> float:
    """Tokens per second from tokens and the milliseconds they took."""
    return tokens / time_ms * 1e3


def worst_rank(per_rank: Sequence[float | None] | None) -> float | None:
    """The largest of the ranks' values; None where nothing was measured."""
    return max([value for value in per_rank if value is not None], default=None) if per_rank else None


def communication_share(trace: Mapping[str, Any]) -> Share:
    """Total and exposed communication as fractions of the traced step of the rank with the most of it."""
    return Share(
        total=_share(trace["total_ms"], trace["step_ms"]),
        exposed=_share(trace["exposed_ms"], trace["step_ms"]),
    )


def attention_exchange_share(trace: Mapping[str, Any]) -> Share | None:
    """The same of the attention exchange alone; None where a record does not tell purposes apart."""
    if "purpose_total_ms" not in trace or any(trace["unjoined"]):
        return None
    nothing = [0.0] * len(trace["step_ms"])
    return Share(
        total=_share(trace["purpose_total_ms"].get("attention", nothing), trace["step_ms"]),
        exposed=_share(trace["purpose_exposed_ms"].get("attention", nothing), trace["step_ms"]),
    )


def straggler_gap_ms(trace: Mapping[str, Any]) -> float:
    """How much longer the slowest rank's traced step took than the median rank's."""
    return float(max(trace["step_ms"]) - statistics.median(trace["step_ms"]))


def utilisation(flops: float, step_ms: float, ranks: int, peak_flops_per_s: float) -> float:
    """Fraction of the peak of all ranks together that `flops` in one step amount to."""
    return flops / (step_ms / 1e3 * ranks * peak_flops_per_s)


def of_record(record: Mapping[str, Any], peaks: Mapping[str, float]) -> Metrics:
    """All metrics of one record; only the note for a cell without a valid result.

    `peaks` maps a hardware's name to its peak FLOP/s.
    """
    if record["status"] != "ok":
        return Metrics(note=record["reason"])
    steps_ms = sorted(slowest_rank_ms((record.get("timing") or {}).get("step_times_ms") or []))
    timed = _timed(record, steps_ms, peaks)
    traced = _traced(record, timed.get("step_time_ms"))
    notes = [
        "warmed up with shorter steps only" if timed.get("warmup") == "short" else None,
        traced.pop("note", None),
        _throttling(record.get("telemetry") or {}),
        load_note(record),
        _uncompared(record.get("parity") or {}),
        *step_notes(steps_ms),
    ]
    return Metrics(
        **timed,
        **_memory(record.get("memory") or {}),
        **traced,
        **_losses(record.get("losses") or {}),
        **attention_metrics(record),
        note="; ".join(filter(None, notes)) or None,
    )


def _share(part_ms: Sequence[float], step_ms: Sequence[float]) -> float:
    worst = max(range(len(part_ms)), key=part_ms.__getitem__)
    return part_ms[worst] / step_ms[worst]


def _timed(
    record: Mapping[str, Any], steps_ms: Sequence[float], peaks: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers of the timed window, whose steps took so long, in order of size."""
    timing = record.get("timing")
    if not timing:
        return {}
    median_ms, interval = statistics.median(steps_ms), median_interval(steps_ms)
    tokens, ranks = timing["tokens_per_step"], len(timing["step_times_ms"])
    return {
        "n_steps": len(steps_ms),
        "warmup": timing["warmup"],
        "tokens_per_step": tokens,
        "step_time_ms": median_ms,
        "step_time_low_ms": interval and interval.low,
        "step_time_high_ms": interval and interval.high,
        "tokens_per_s": tokens_per_s(tokens, median_ms),
        "tokens_per_s_low": interval and tokens_per_s(tokens, interval.high),
        "tokens_per_s_high": interval and tokens_per_s(tokens, interval.low),
        "tokens_per_s_per_rank": tokens_per_s(tokens, median_ms) / ranks,
        "window_tokens_per_s": tokens_per_s(tokens * len(steps_ms), max(timing["window_ms"])),
        **_utilisations(record, median_ms, ranks, peaks),
    }


def _utilisations(
    record: Mapping[str, Any], step_ms: float, ranks: int, peaks: Mapping[str, float]
) -> dict[str, float]:
    config = record["config"]
    peak = peaks.get(str(config.get("hardware")))
    if peak is None or config.get("dtype") not in PEAK_DTYPES:
        return {}
    analytic = record.get("analytic") or {}
    sources = {
        "mfu_causal": "model_flops_causal",
        "mfu_full": "model_flops_full",
        "hfu_causal": "hardware_flops_causal",
        "hfu_full": "hardware_flops_full",
    }
    return {
        name: utilisation(analytic[source], step_ms, ranks, peak)
        for name, source in sources.items()
        if source in analytic
    }


def _traced(record: Mapping[str, Any], step_time_ms: float | None) -> dict[str, Any]:
    trace = record.get("trace")
    if not trace:
        return {}
    ratio = None if step_time_ms is None else max(trace["step_ms"]) / step_time_ms
    if ratio is not None and ratio > MAX_TRACED_TO_TIMED:
        note = f"communication share void: the traced step took {ratio:.2f} times the timed step"
        return {"traced_to_timed": ratio, "note": note}
    share, exchange = communication_share(trace), attention_exchange_share(trace)
    return {
        "traced_to_timed": ratio,
        "communication_share": share.total,
        "exposed_communication_share": share.exposed,
        "attention_exchange_share": exchange and exchange.total,
        "exposed_attention_exchange_share": exchange and exchange.exposed,
        "straggler_gap_ms": straggler_gap_ms(trace),
        **part_columns(trace),
        "note": UNJOINED if any(trace.get("unjoined", ())) else None,
    }


def _memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    resident, base = memory.get("peak_resident_bytes"), memory.get("base_resident_bytes")
    above_base = [
        peak - start
        for peak, start in zip(resident or [], base or [], strict=False)
        if peak is not None and start is not None
    ]
    peaks = {name: worst_rank(memory.get(name)) for name in PEAKS}
    return {**peaks, "resident_above_base_bytes": worst_rank(above_base)}


def _throttling(telemetry: Mapping[str, Any]) -> str | None:
    """What held a device back while the clock ran, if anything did."""
    if not telemetry.get("throttled"):
        return None
    seen = dict.fromkeys(name for events in telemetry.get("clock_events") or () for name in events)
    return f"throttled while timed ({', '.join(seen) or 'low clock'})"


def _uncompared(parity: Mapping[str, Any]) -> str | None:
    reason = parity.get("reason")
    return f"attention not compared with float64: {reason}" if reason else None


def _losses(losses: Mapping[str, Any]) -> dict[str, Any]:
    loss = losses.get("loss")
    return {"first_loss": loss[0], "last_loss": loss[-1]} if loss else {}
