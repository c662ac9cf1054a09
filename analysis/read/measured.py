"""What one record measured, made ready for its metrics. Every function is pure; not measured is None.

A predicted record has one step of one rank: its figures are expected values, and nothing was sampled.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from analysis.read.checks import Checked, checked, told
from analysis.read.notes import note_of
from analysis.read.recorded import (
    Analytic,
    AttentionCalls,
    Band,
    Losses,
    Memory,
    Prediction,
    Recorded,
    Timing,
    Trace,
    Ulps,
)
from analysis.read.step_parts import StepParts, step_parts
from analysis.read.traced_shares import (
    PurposeShares,
    TracedShares,
    expected_shares,
    is_void,
    traced_shares,
)
from bench.common.statistics import median_interval
from bench.record.record import Provenance, Role

PEAK_DTYPES = frozenset({"bf16", "fp16"})
"""`peak_flops_per_s` in conf/hardware is the dense 16-bit figure, so MFU exists for these only."""
OF_ONE_RANK = frozenset({Provenance.PREDICTED, Provenance.REPLAYED})
"""Provenances of records whose steps are those of one rank of many."""


class Steps(Struct, frozen=True, kw_only=True):
    """The timed steps, each as long as its slowest rank took; or the expected one."""

    timed: int | None = None
    """How many were timed; None of a prediction, as are the warm-up and the window."""
    median_ms: float
    low_ms: float | None = None
    """Both ends of the median's 95 % interval; None where there are too few steps for one."""
    high_ms: float | None = None
    warmup: str | None = None
    tokens: int
    """Of one step, as are those of the next four per second."""
    tokens_per_s: float
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    tokens_per_s_per_rank: float
    window_tokens_per_s: float | None = None
    """All tokens over the whole window of the rank that took longest."""


class Utilisation(Struct, frozen=True, kw_only=True):
    """Fractions of the peak; None where the FLOPs are not known."""

    mfu_causal: float | None
    mfu_full: float | None
    hfu_causal: float | None
    hfu_full: float | None


class Calls(Struct, frozen=True, kw_only=True):
    """Calls of attention alone, each as long as its slowest rank took."""

    forward_ms: float
    """The median over calls, as the next one."""
    backward_ms: float
    flops_per_s: float | None
    """Of all ranks, forward and backward, by the area that the mask leaves; backward as 2.5 forwards
    (arXiv:2307.08691, section 4)."""
    of_single: float | None
    """The time of the same kernel on one device, divided by the ranks that share a sequence, over this one's:
    1 is ideal."""
    error_ulps: Ulps


class Link(Struct, frozen=True, kw_only=True):
    """The link of one replayed step, as if no computation hid any of its time."""

    low_ms: float
    expected_ms: float
    high_ms: float
    tokens_per_s: float
    """The rate of a step that is longer by `high_ms`."""


class Share(NamedTuple):
    """Communication of one traced step as a fraction of that step: the worst rank's, each by itself."""

    total: float
    exposed: float


class EndLosses(NamedTuple):
    """The losses of the first step and of the last."""

    first: float | None
    """None of a wrong result, whose loss was no finite number, as is the next one."""
    last: float | None
    held_against: str | None
    """The cell whose losses they were compared with; None where there is none."""


class Measured(Struct, frozen=True, kw_only=True):
    """One record that worked. Each field is what some metrics are computed from, None where it is unknown."""

    steps: Steps | None = None
    link: Link | None = None
    """None of what was not replayed."""
    utilisation: Utilisation | None = None
    memory: Memory | None = None
    needed_bytes: int | None = None
    """By the formula, of one rank."""
    traced_to_timed: float | None = None
    straggler_gap_ms: float | None = None
    """None also where the median traced step is void, as are the next three."""
    communication: Share | None = None
    exchange: Share | None = None
    parts: StepParts | None = None
    shares: TracedShares | None = None
    exchange_shares: PurposeShares | None = None
    """Of the traced steps that are not void, as is the next one; None where there is none."""
    communication_shares: PurposeShares | None = None
    losses: EndLosses | None = None
    calls: Calls | None = None
    control_error_ulps: Ulps | None = None
    """The kernel's own error, on one device."""
    checked: Checked | None = None
    """None of a record that does not say."""
    checks_told: str | None = None
    """What was checked of somebody's own loop, and what was not; None of cells, whose checks are the same."""
    predicted: Prediction | None = None
    """Also of a record that did not work, as are the next two; None where the record carries none."""
    predicted_tokens_per_s: Band | None = None
    note: str | None = None
    """What a reader must know."""


def measured(record: Recorded, peaks: Mapping[str, float]) -> Measured:
    """The record made ready; only its prediction, and the reason as its note, where it has no valid result.

    `peaks` maps a hardware's name to its peak FLOP/s.
    """
    if record.status != "ok":
        return replace(_predicted(record), note=record.reason)
    if record.provenance == Provenance.PREDICTED:
        return _expected(record, peaks)
    steps_ms = sorted(slowest_rank_ms(record.timing.step_times_ms)) if record.timing else []
    steps, trace = _steps(record, record.timing, steps_ms) if record.timing else None, record.trace
    ratio = max(trace.step_ms) / steps.median_ms if trace and steps else None
    shares = traced_shares(trace, steps.median_ms if steps else None) if trace else None
    if ratio is not None and is_void(ratio):
        trace = None
    return replace(
        _predicted(record),
        steps=steps,
        link=_link(record.analytic, steps) if steps and record.analytic else None,
        utilisation=_utilisation(record, steps, peaks) if steps else None,
        memory=record.memory,
        needed_bytes=record.analytic.needed_bytes if record.analytic else None,
        traced_to_timed=ratio,
        straggler_gap_ms=straggler_gap_ms(trace.step_ms) if trace else None,
        communication=communication_share(trace) if trace else None,
        exchange=attention_exchange_share(trace) if trace else None,
        parts=step_parts(trace) if trace else None,
        shares=shares,
        exchange_shares=shares.exchange if shares else None,
        communication_shares=shares.communication if shares else None,
        losses=_end_losses(record.losses) if record.losses else None,
        calls=_calls(record) if record.attention else None,
        control_error_ulps=record.attention.control_error_ulps
        if record.attention and record.analytic and record.provenance != Provenance.REPLAYED
        else None,
        checked=None if record.checks is None else checked(record.checks),
        checks_told=told(record.checks) if record.checks and record.role == Role.OBSERVED else None,
        note=note_of(record, steps_ms, shares),
    )


def _expected(record: Recorded, peaks: Mapping[str, float]) -> Measured:
    """A record of arithmetic: nothing was timed, traced, checked or waited for."""
    steps, trace = _expected_step(record), record.trace
    return replace(
        _predicted(record),
        steps=steps,
        utilisation=_utilisation(record, steps, peaks) if steps else None,
        memory=record.memory,
        needed_bytes=record.analytic.needed_bytes if record.analytic else None,
        communication=communication_share(trace) if trace else None,
        exchange=attention_exchange_share(trace) if trace else None,
        parts=step_parts(trace) if trace else None,
        exchange_shares=expected_shares(trace, "attention") if trace else None,
        communication_shares=expected_shares(trace) if trace else None,
    )


def _predicted(record: Recorded) -> Measured:
    """The prediction that a predicted record carries, and nothing else."""
    tokens = record.analytic.tokens_per_step if record.analytic else None
    found = record.analytic.prediction if record.analytic else None
    if found is None or tokens is None:
        return Measured()
    times = found.step_time_ms
    low, expected, high = (tokens_per_s(tokens, each) for each in (times.high, times.expected, times.low))
    return Measured(predicted=found, predicted_tokens_per_s=Band(low, expected, high))


def slowest_rank_ms(step_times_ms: Sequence[Sequence[float]]) -> list[float]:
    """Per step the slowest rank's time in ms, from `step_times_ms[rank][step]`."""
    return [*map(max, *step_times_ms)] if len(step_times_ms) > 1 else [*chain(*step_times_ms)]


def tokens_per_s(tokens: float, time_ms: float) -> float:
    """Tokens per second from tokens and the milliseconds they took."""
    return tokens / time_ms * 1e3


def worst_rank(per_rank: Sequence[float | None] | None) -> float | None:
    """The largest of the ranks' values; None where nothing was measured."""
    return max([value for value in per_rank or () if value is not None], default=None)


def resident_above_base(memory: Memory) -> float | None:
    """The worst rank's resident memory above its own base."""
    resident, base = memory.peak_resident_bytes or (), memory.base_resident_bytes or ()
    return worst_rank(
        [
            peak - start
            for peak, start in zip(resident, base, strict=False)
            if peak is not None and start is not None
        ]
    )


def communication_share(trace: Trace) -> Share:
    """Total and exposed communication as fractions of the traced step of the rank with the most of it."""
    return Share(_share(trace.total_ms, trace.step_ms), _share(trace.exposed_ms, trace.step_ms))


def attention_exchange_share(trace: Trace) -> Share | None:
    """The shares of the attention exchange alone; None where a record does not list purposes."""
    total_ms, exposed_ms = trace.purpose_total_ms, trace.purpose_exposed_ms
    if total_ms is None or exposed_ms is None or any(trace.unjoined):
        return None
    nothing = [0.0] * len(trace.step_ms)
    total, exposed = (times.get("attention", nothing) for times in (total_ms, exposed_ms))
    return Share(_share(total, trace.step_ms), _share(exposed, trace.step_ms))


def straggler_gap_ms(step_ms: Sequence[float]) -> float:
    """How much longer the slowest rank's step took than the median rank's."""
    return max(step_ms) - statistics.median(step_ms)


def utilisation(flops: float, step_ms: float, ranks: int, peak_flops_per_s: float) -> float:
    """Fraction of the peak of all ranks together that `flops` in one step amount to."""
    return flops / (step_ms / 1e3 * ranks * peak_flops_per_s)


def _link(analytic: Analytic, steps: Steps) -> Link | None:
    """The link's time of all purposes together; None where it is not known."""
    if analytic.link_ms is None:
        return None
    ends = ("low", "expected", "high")
    low, expected, high = (sum(getattr(each, end) for each in analytic.link_ms.values()) for end in ends)
    rate = tokens_per_s(steps.tokens, steps.median_ms + high)
    return Link(low_ms=low, expected_ms=expected, high_ms=high, tokens_per_s=rate)


def _steps(record: Recorded, timing: Timing, steps_ms: Sequence[float]) -> Steps:
    """What is known of these steps of the slowest rank."""
    median_ms, interval = statistics.median(steps_ms), median_interval(steps_ms)
    tokens = timing.tokens_per_step
    rate = tokens_per_s(tokens, median_ms)
    return Steps(
        timed=len(steps_ms),
        median_ms=median_ms,
        low_ms=interval.low if interval else None,
        high_ms=interval.high if interval else None,
        warmup=timing.warmup,
        tokens=tokens,
        tokens_per_s=rate,
        tokens_per_s_low=tokens_per_s(tokens, interval.high) if interval else None,
        tokens_per_s_high=tokens_per_s(tokens, interval.low) if interval else None,
        tokens_per_s_per_rank=rate / _rank_count(record),
        window_tokens_per_s=tokens_per_s(tokens * len(steps_ms), max(timing.window_ms)),
    )


def _end_losses(losses: Losses) -> EndLosses | None:
    return EndLosses(losses.loss[0], losses.loss[-1], losses.held_against) if losses.loss else None


def _expected_step(record: Recorded) -> Steps | None:
    """The one step of a prediction, which stands for all ranks."""
    if record.timing is None:
        return None
    step_ms = statistics.median(slowest_rank_ms(record.timing.step_times_ms))
    tokens = record.timing.tokens_per_step
    rate = tokens_per_s(tokens, step_ms)
    return Steps(
        median_ms=step_ms,
        tokens=tokens,
        tokens_per_s=rate,
        tokens_per_s_per_rank=rate / _rank_count(record),
    )


def _rank_count(record: Recorded) -> int:
    """Steps of a prediction or replay are of one rank, those of other records of all."""
    if record.provenance in OF_ONE_RANK:
        return int(record.config.get("cluster.world_size", 1))
    return len(record.timing.step_times_ms) if record.timing else 1


def _utilisation(record: Recorded, steps: Steps, peaks: Mapping[str, float]) -> Utilisation | None:
    peak = peaks.get(str(record.config.get("hardware")))
    if (
        record.provenance == Provenance.REPLAYED
    ):  # a step without a link uses more of the peak than any real one
        return None
    if peak is None or record.config.get("dtype") not in PEAK_DTYPES:
        return None
    if record.analytic is None or record.timing is None:
        return None
    ranks, analytic = _rank_count(record), record.analytic

    def of(flops: float | None) -> float | None:
        return None if flops is None else utilisation(flops, steps.median_ms, ranks, peak)

    return Utilisation(
        mfu_causal=of(analytic.model_flops_causal),
        mfu_full=of(analytic.model_flops_full),
        hfu_causal=of(analytic.hardware_flops_causal),
        hfu_full=of(analytic.hardware_flops_full),
    )


def _calls(record: Recorded) -> Calls | None:
    """None of a record without arithmetic."""
    section, analytic = record.attention, record.analytic
    if section is None or analytic is None:
        return None
    forward_ms, backward_ms = slowest_rank_ms(section.forward_ms), slowest_rank_ms(section.backward_ms)
    both_ms = _median_of_both(forward_ms, backward_ms)
    forward_flops, backward_flops = analytic.attention_forward_flops, analytic.attention_backward_flops
    flops = None if forward_flops is None or backward_flops is None else forward_flops + backward_flops
    if record.provenance == Provenance.REPLAYED:  # one rank's time is not that of the FLOPs of all
        flops = None
    return Calls(
        forward_ms=statistics.median(forward_ms),
        backward_ms=statistics.median(backward_ms),
        flops_per_s=flops and flops / both_ms * 1e3,
        of_single=_of_single(section, both_ms, record.config.get("sp_degree", 1)),
        error_ulps=section.error_ulps,
    )


def _of_single(section: AttentionCalls, both_ms: float, sp_degree: int) -> float | None:
    forward_ms, backward_ms = section.single_forward_ms, section.single_backward_ms
    if forward_ms is None or backward_ms is None:
        return None
    return _median_of_both(forward_ms, backward_ms) / sp_degree / both_ms


def _median_of_both(forward_ms: Sequence[float], backward_ms: Sequence[float]) -> float:
    return statistics.median(map(sum, zip(forward_ms, backward_ms, strict=True)))


def _share(part_ms: Sequence[float], step_ms: Sequence[float]) -> float:
    worst_ms = max(part_ms)
    return worst_ms / step_ms[part_ms.index(worst_ms)]
