"""From one record's raw samples to numbers. Every function is pure; what was not measured is None."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from analysis.metrics.attention_calls import AttentionMetrics, attention_metrics
from analysis.metrics.recorded import Losses, Memory, Parity, Recorded, Telemetry, Timing, Trace
from analysis.metrics.stability import load_note, step_notes
from analysis.metrics.step_parts import part_columns
from bench.median import median_interval

MAX_TRACED_TO_TIMED = 1.2
"""Above this the profiler slowed the step too much for its shares to describe the timed one."""

UNJOINED = "communication by purpose unknown: the traced step made other calls than the inspected one"

PEAK_DTYPES = frozenset({"bf16", "fp16"})
"""`peak_flops_per_s` in conf/hardware is the dense 16-bit figure, so MFU exists for these only."""


class Share(NamedTuple):
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


def communication_share(trace: Trace) -> Share:
    """Total and exposed communication as fractions of the traced step of the rank with the most of it."""
    return Share(_share(trace.total_ms, trace.step_ms), _share(trace.exposed_ms, trace.step_ms))


def attention_exchange_share(trace: Trace) -> Share | None:
    """The same of the attention exchange alone; None where a record does not tell purposes apart."""
    total_ms, exposed_ms = trace.purpose_total_ms, trace.purpose_exposed_ms
    if total_ms is None or exposed_ms is None or any(trace.unjoined):
        return None
    nothing = [0.0] * len(trace.step_ms)
    total, exposed = (times.get("attention", nothing) for times in (total_ms, exposed_ms))
    return Share(_share(total, trace.step_ms), _share(exposed, trace.step_ms))


def straggler_gap_ms(trace: Trace) -> float:
    """How much longer the slowest rank's traced step took than the median rank's."""
    return max(trace.step_ms) - statistics.median(trace.step_ms)


def utilisation(flops: float, step_ms: float, ranks: int, peak_flops_per_s: float) -> float:
    """Fraction of the peak of all ranks together that `flops` in one step amount to."""
    return flops / (step_ms / 1e3 * ranks * peak_flops_per_s)


def of_record(record: Recorded, peaks: Mapping[str, float]) -> Metrics:
    """All metrics of one record; only the note for a cell without a valid result.

    `peaks` maps a hardware's name to its peak FLOP/s.
    """
    if record.status != "ok":
        return Metrics(note=record.reason)
    steps_ms = sorted(slowest_rank_ms(record.timing.step_times_ms)) if record.timing else []
    timed = _timed(record.timing, steps_ms) if record.timing else {}
    traced = _traced(record.trace, timed.get("step_time_ms")) if record.trace else {}
    notes = [
        "warmed up with shorter steps only" if timed.get("warmup") == "short" else None,
        traced.pop("note", None),
        _throttling(record.telemetry) if record.telemetry else None,
        load_note(record),
        _uncompared(record.parity) if record.parity else None,
        *step_notes(steps_ms),
    ]
    return Metrics(
        **timed,
        **_utilisations(record, timed.get("step_time_ms"), peaks),
        **_memory(record.memory) if record.memory else {},
        **traced,
        **_losses(record.losses) if record.losses else {},
        **attention_metrics(record),
        note="; ".join(filter(None, notes)) or None,
    )


def _share(part_ms: Sequence[float], step_ms: Sequence[float]) -> float:
    worst = max(range(len(part_ms)), key=part_ms.__getitem__)
    return part_ms[worst] / step_ms[worst]


def _timed(timing: Timing, steps_ms: Sequence[float]) -> dict[str, Any]:
    """The numbers of the timed window, whose steps took so long, in order of size."""
    median_ms, interval = statistics.median(steps_ms), median_interval(steps_ms)
    tokens = timing.tokens_per_step
    return {
        "n_steps": len(steps_ms),
        "warmup": timing.warmup,
        "tokens_per_step": tokens,
        "step_time_ms": median_ms,
        "step_time_low_ms": interval and interval.low,
        "step_time_high_ms": interval and interval.high,
        "tokens_per_s": tokens_per_s(tokens, median_ms),
        "tokens_per_s_low": interval and tokens_per_s(tokens, interval.high),
        "tokens_per_s_high": interval and tokens_per_s(tokens, interval.low),
        "tokens_per_s_per_rank": tokens_per_s(tokens, median_ms) / len(timing.step_times_ms),
        "window_tokens_per_s": tokens_per_s(tokens * len(steps_ms), max(timing.window_ms)),
    }


def _utilisations(record: Recorded, step_ms: float | None, peaks: Mapping[str, float]) -> dict[str, Any]:
    peak = peaks.get(str(record.config.get("hardware")))
    if peak is None or record.config.get("dtype") not in PEAK_DTYPES:
        return {}
    if record.analytic is None or record.timing is None or step_ms is None:
        return {}
    ranks = len(record.timing.step_times_ms)
    return {
        name: None if flops is None else utilisation(flops, step_ms, ranks, peak)
        for name, flops in {
            "mfu_causal": record.analytic.model_flops_causal,
            "mfu_full": record.analytic.model_flops_full,
            "hfu_causal": record.analytic.hardware_flops_causal,
            "hfu_full": record.analytic.hardware_flops_full,
        }.items()
    }


def _traced(trace: Trace, step_time_ms: float | None) -> dict[str, Any]:
    ratio = None if step_time_ms is None else max(trace.step_ms) / step_time_ms
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
        "note": UNJOINED if any(trace.unjoined) else None,
    }


def _memory(memory: Memory) -> dict[str, Any]:
    resident, base = memory.peak_resident_bytes or (), memory.base_resident_bytes or ()
    above_base = [
        peak - start
        for peak, start in zip(resident, base, strict=False)
        if peak is not None and start is not None
    ]
    return {
        "peak_allocated_bytes": worst_rank(memory.peak_allocated_bytes),
        "peak_reserved_bytes": worst_rank(memory.peak_reserved_bytes),
        "peak_resident_bytes": worst_rank(memory.peak_resident_bytes),
        "resident_above_base_bytes": worst_rank(above_base),
        "whole_life_allocated_bytes": worst_rank(memory.whole_life_allocated_bytes),
        "device_used_bytes": worst_rank(memory.device_used_bytes),
    }


def _throttling(telemetry: Telemetry) -> str | None:
    """What held a device back while the clock ran, if anything did."""
    if not telemetry.throttled:
        return None
    seen = dict.fromkeys(name for events in telemetry.clock_events or () for name in events)
    return f"throttled while timed ({', '.join(seen) or 'low clock'})"


def _uncompared(parity: Parity) -> str | None:
    return f"attention not compared with float64: {parity.reason}" if parity.reason else None


def _losses(losses: Losses) -> dict[str, Any]:
    return {"first_loss": losses.loss[0], "last_loss": losses.loss[-1]} if losses.loss else {}
