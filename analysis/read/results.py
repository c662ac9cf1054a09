"""A record's numbers, made ready for its metrics. Not measured is None.

A predicted record has one step of one rank: its numbers are expected values, and nothing was sampled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from analysis.read.checks import checks_sentence
from analysis.read.notes import note_of
from analysis.read.step_parts import StepParts, step_parts
from analysis.read.traced_shares import PurposeShares, TracedShares, expected_shares, is_void, traced_shares
from bench.common.statistics import Interval, median_interval, slowest, slowest_median
from bench.cost.band import Band
from bench.measure.attention.section import AttentionSection
from bench.measure.check import Check
from bench.measure.losses.section import LossesSection
from bench.measure.memory.section import MemorySection
from bench.measure.timing.section import TimingSection
from bench.measure.trace.section import TraceSection
from bench.record.analytic import Analytic, PredictedStep
from bench.record.record import Provenance, Record, Role, Status

SECONDS_PER_HOUR = 3600
MIN_POWER_SAMPLES = 6
"""Samples of each GPU, 200 ms apart, below which their mean says little of the window."""
PEAK_DTYPES = frozenset({"bf16", "fp16"})
"""`peak_flops_per_s` in conf/hardware is the dense 16-bit figure, so MFU exists for these only."""


class Results:
    """Numbers of one record. Sections and steps are None for a cell without a valid result."""

    def __init__(self, record: Record, peaks: Mapping[str, float]) -> None:
        """`peaks` maps a hardware's name to its peak FLOP/s."""
        self.record = record
        self.is_ok = record.status is Status.OK
        self.is_predicted = record.provenance is Provenance.PREDICTED
        self.is_replayed = record.provenance is Provenance.REPLAYED
        self.timing: TimingSection | None = self._of_valid(record.timing)
        self.memory: MemorySection | None = self._of_valid(record.memory)
        self.losses: LossesSection | None = self._of_valid(record.losses)
        self.attention: AttentionSection | None = self._of_valid(record.attention)
        self.analytic: Analytic | None = self._of_valid(record.analytic)
        self.predicted: PredictedStep | None = record.analytic.prediction
        self._peak_flops_per_s = peaks.get(str(record.config.get("hardware")))

    def _of_valid(self, section: Any) -> Any:
        return section if self.is_ok else None

    @cached_property
    def steps_ms(self) -> list[float]:
        """Milliseconds of each timed step on its slowest rank, sorted; or of the expected one."""
        return [] if self.timing is None else sorted(slowest(self.timing.step_times_ms))

    @property
    def timed_steps(self) -> int | None:
        return None if self.timing is None or self.is_predicted else len(self.steps_ms)

    @cached_property
    def median_ms(self) -> float | None:
        return statistics.median(self.steps_ms) if self.steps_ms else None

    @cached_property
    def interval(self) -> Interval | None:
        """95 % interval of the median step; None for too few steps and for a prediction."""
        return None if self.is_predicted else median_interval(self.steps_ms)

    @property
    def tokens(self) -> int | None:
        """Tokens of one step of all ranks."""
        return None if self.timing is None else self.timing.tokens_per_step

    def rate(self, step_ms: float | None) -> float | None:
        """Return the tokens/s of all ranks where a step takes `step_ms`."""
        return None if step_ms is None or self.tokens is None else tokens_per_s(self.tokens, step_ms)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of all timed steps."""
        return None if self.tokens is None or self.timed_steps is None else self.tokens * self.timed_steps

    @property
    def window_tokens_per_s(self) -> float | None:
        """Tokens/s over the whole window of the rank that took longest."""
        if self.timing is None or self.window_tokens is None:
            return None
        return tokens_per_s(self.window_tokens, max(self.timing.window_ms))

    @property
    def warmup(self) -> str | None:
        return None if self.timing is None or self.is_predicted else self.timing.warmup

    @property
    def ranks(self) -> int:
        """Ranks of the cell, also where one of them ran."""
        if self.is_predicted or self.is_replayed or self.timing is None:
            return int(self.record.config.get("cluster.world_size", 1))
        return len(self.timing.step_times_ms)

    @property
    def gpus(self) -> float | None:
        """GPUs of the cell; None on a CPU."""
        config = self.record.config
        if config.get("cluster.device") != "cuda":
            return None
        return self.ranks / float(config.get("cluster.ranks_per_gpu") or 1)

    def gpu_hours(self, tokens: float) -> float | None:
        """Return the GPU-hours of so many tokens; None for a replay, whose rate has no link in it."""
        rate = self.rate(self.median_ms)
        if rate is None or self.gpus is None or self.is_replayed:
            return None
        return self.gpus * tokens / rate / SECONDS_PER_HOUR

    @cached_property
    def link(self) -> Band | None:
        """Milliseconds on the link of one replayed step, as if no computation hid any of them."""
        bands = None if self.analytic is None or self.timing is None else self.analytic.link_ms
        if bands is None:
            return None
        return Band.from_function(lambda end: sum(band.value_at(end) for band in bands.values()))

    @property
    def tokens_per_s_with_link(self) -> float | None:
        """Tokens/s of a step that is longer by all of the link's time, at its high end."""
        link = self.link
        return None if link is None or self.median_ms is None else self.rate(self.median_ms + link.high)

    def utilisation(self, flops: float | None) -> float | None:
        """Return the fraction of all ranks' peak that `flops` in a median step amount to.

        None for a replay: a step without a link uses more of the peak than a real one.
        """
        peak, has_peak = self._peak_flops_per_s, self.record.config.get("dtype") in PEAK_DTYPES
        if None in (flops, peak, self.median_ms) or self.is_replayed or not has_peak:
            return None
        return utilisation(flops or 0.0, self.median_ms or 0.0, self.ranks, peak or 0.0)

    @cached_property
    def traces(self) -> TraceSection | None:
        """Traced steps; None also where tracing failed."""
        trace = self.record.trace if self.is_ok else None
        return None if trace is None or trace.failure is not None else trace

    @property
    def traced_to_timed(self) -> float | None:
        """Traced step of median length over the median timed step."""
        if self.traces is None or self.median_ms is None or self.is_predicted:
            return None
        return max(self.traces.step_ms) / self.median_ms

    @cached_property
    def trace(self) -> TraceSection | None:
        """Traced step of median length; None where it is too unlike a timed one."""
        ratio = self.traced_to_timed
        return None if ratio is not None and is_void(ratio) else self.traces

    @cached_property
    def shares(self) -> TracedShares | None:
        """Shares of all traced steps; None for a prediction."""
        if self.traces is None or self.is_predicted:
            return None
        return traced_shares(self.traces, self.median_ms)

    @cached_property
    def attention_shares(self) -> PurposeShares | None:
        if self.is_predicted:
            return None if self.traces is None else expected_shares(self.traces, "attention")
        return None if self.shares is None else self.shares.attention

    @cached_property
    def communication_shares(self) -> PurposeShares | None:
        if self.is_predicted:
            return None if self.traces is None else expected_shares(self.traces)
        return None if self.shares is None else self.shares.communication

    def traced_share(self, times_ms: Callable[[TraceSection], Sequence[float] | None]) -> float | None:
        """Return the share of its traced step that the rank with most of these times spent on them."""
        found = None if self.trace is None else times_ms(self.trace)
        if self.trace is None or not found:
            return None
        worst_ms = max(found)
        return worst_ms / self.trace.step_ms[found.index(worst_ms)]

    @property
    def straggler_gap_ms(self) -> float | None:
        """Milliseconds by which the slowest rank's traced step is longer than the median rank's."""
        if self.trace is None or self.is_predicted:
            return None
        return max(self.trace.step_ms) - statistics.median(self.trace.step_ms)

    @cached_property
    def parts(self) -> StepParts | None:
        return None if self.trace is None else step_parts(self.trace)

    @property
    def forward_ms(self) -> float | None:
        """Median forward of attention alone, on the slowest rank of each call."""
        return None if self.attention is None else slowest_median(self.attention.forward_ms)

    @property
    def backward_ms(self) -> float | None:
        """Median backward of attention alone, on the slowest rank of each call."""
        return None if self.attention is None else slowest_median(self.attention.backward_ms)

    @cached_property
    def both_ms(self) -> float | None:
        """Median call of attention alone, forward and backward."""
        if self.attention is None:
            return None
        return _both_ms(slowest(self.attention.forward_ms), slowest(self.attention.backward_ms))

    @property
    def attention_flops_per_s(self) -> float | None:
        """FLOP/s of all ranks, by the area that the mask leaves; backward as 2.5 forwards.

        arXiv:2307.08691, section 4. None for a replay: one rank's time is not that of the FLOPs of all.
        """
        if self.analytic is None or self.both_ms is None or self.is_replayed:
            return None
        forward, backward = self.analytic.attention_forward_flops, self.analytic.attention_backward_flops
        return None if forward is None or backward is None else (forward + backward) / self.both_ms * 1e3

    @property
    def attention_of_one_device(self) -> float | None:
        """One device's time for the same call, divided by the ranks that share it, over this time."""
        if self.attention is None or self.both_ms is None:
            return None
        forward_ms, backward_ms = self.attention.one_device_forward_ms, self.attention.one_device_backward_ms
        if forward_ms is None or backward_ms is None:
            return None
        sp_degree = float(self.record.config.get("sp_degree", 1))
        return _both_ms(forward_ms, backward_ms) / sp_degree / self.both_ms

    @property
    def control_error_ulps(self) -> Mapping[str, float | None]:
        """Errors of the kernel alone on one device."""
        if self.attention is None or self.is_replayed:
            return {}
        return self.attention.control_error_ulps or {}

    @property
    def window_joules(self) -> float | None:
        """Energy of all GPUs over the timed window, by NVML's power samples; None where a GPU has too few."""
        telemetry = self._of_valid(self.record.telemetry)
        if telemetry is None or telemetry.power_w is None or self.timing is None or self.is_replayed:
            return None
        if min(map(len, telemetry.power_w)) < MIN_POWER_SAMPLES:
            return None
        mean_w = sum(map(statistics.fmean, telemetry.power_w))
        sharing = float(self.record.config.get("cluster.ranks_per_gpu") or 1)
        return mean_w / sharing * max(self.timing.window_ms) / 1e3

    @property
    def checks(self) -> Sequence[Check] | None:
        """Checks of a valid result; None for a prediction."""
        found: Sequence[Check] | None = self._of_valid(self.record.checks)
        return None if self.is_predicted else found

    @property
    def checks_of_loop(self) -> str | None:
        """Sentence on the checks of an observed loop; None for cells, whose checks are all the same."""
        return checks_sentence(self.checks) if self.checks and self.record.role is Role.OBSERVED else None

    @property
    def note(self) -> str | None:
        """Reader's warnings about a result, or the reason why there is none."""
        if not self.is_ok:
            return self.record.reason
        return None if self.is_predicted else note_of(self.record, self.steps_ms, self.shares)


def tokens_per_s(tokens: float, time_ms: float) -> float:
    """Tokens per second from tokens and the milliseconds they took."""
    return tokens / time_ms * 1e3


def utilisation(flops: float, step_ms: float, ranks: int, peak_flops_per_s: float) -> float:
    """Return the fraction of the peak of all ranks together that `flops` in one step amount to."""
    return flops / (step_ms / 1e3 * ranks * peak_flops_per_s)


def _both_ms(forward_ms: Sequence[float], backward_ms: Sequence[float]) -> float:
    return statistics.median(map(sum, zip(forward_ms, backward_ms, strict=True)))
