"""Attention alone, from a record's raw calls to numbers. What was not measured is None."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from analysis.metrics.recorded import AttentionCalls, Recorded


class AttentionMetrics(Struct, frozen=True, kw_only=True):
    """Numbers of one record's calls; times are medians over calls of the slowest rank.

    `attention_flops_per_s` is of all ranks, forward and backward, by the area that the mask leaves, backward
    as 2.5 forwards (arXiv:2307.08691, section 4). `attention_of_single` is the time of the same kernel on one
    device, divided by the ranks that share a sequence, over this strategy's: 1 is ideal.
    """

    attention_forward_ms: float | None = None
    attention_backward_ms: float | None = None
    attention_flops_per_s: float | None = None
    attention_of_single: float | None = None
    out_error_ulps: float | None = None
    dq_error_ulps: float | None = None
    control_out_error_ulps: float | None = None
    control_dq_error_ulps: float | None = None


ATTENTION_COLUMNS = AttentionMetrics.__struct_fields__


def attention_metrics(record: Recorded) -> dict[str, Any]:
    """The numbers of a record of attention alone; empty for any other."""
    calls, analytic = record.attention, record.analytic
    if calls is None or analytic is None:
        return {}
    forward_ms, backward_ms = _slowest_ms(calls.forward_ms), _slowest_ms(calls.backward_ms)
    both_ms = statistics.median(map(sum, zip(forward_ms, backward_ms, strict=True)))
    forward_flops, backward_flops = analytic.attention_forward_flops, analytic.attention_backward_flops
    flops = None if forward_flops is None or backward_flops is None else forward_flops + backward_flops
    control = calls.control_error_ulps
    return {
        "attention_forward_ms": statistics.median(forward_ms),
        "attention_backward_ms": statistics.median(backward_ms),
        "attention_flops_per_s": flops and flops / both_ms * 1e3,
        "attention_of_single": _of_single(calls, both_ms, record.config.get("sp_degree", 1)),
        "out_error_ulps": calls.error_ulps.out,
        "dq_error_ulps": calls.error_ulps.dq,
        "control_out_error_ulps": control and control.out,
        "control_dq_error_ulps": control and control.dq,
    }


def _slowest_ms(times_ms: Sequence[Sequence[float]]) -> list[float]:
    return [*map(max, zip(*times_ms, strict=True))]


def _of_single(calls: AttentionCalls, both_ms: float, sp_degree: int) -> float | None:
    forward_ms, backward_ms = calls.single_forward_ms, calls.single_backward_ms
    if forward_ms is None or backward_ms is None:
        return None
    single_ms = statistics.median(map(sum, zip(forward_ms, backward_ms, strict=True)))
    return single_ms / sp_degree / both_ms
