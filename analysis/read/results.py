"""Computes the numbers behind the metrics from one record. A number that was not measured is None.

A predicted record has one step of one rank with expected values. Nothing was sampled, so that numbers of
samples, intervals and notes are None.
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
from bench.common.statistics import Interval, median_interval, slowest_median, slowest_rank_times
from bench.cost.band import Band
from bench.measure.attention.section import AttentionSection
from bench.measure.check import Check
from bench.measure.losses.section import LossesSection
from bench.measure.memory.section import MemorySection
from bench.measure.quality.section import QualitySection
from bench.measure.timing.section import TimingSection
from bench.measure.trace.section import TraceSection
from bench.record.analytic import Analytic, PredictedStep
from bench.record.record import Provenance, Record, Role, Status

SECONDS_PER_HOUR = 3600
MIN_POWER_SAMPLES = 6
"""Smallest number of power samples per GPU, 200 ms apart, whose mean represents the timed window."""
PEAK_DTYPES = frozenset({"bf16", "fp16"})
"""Dtypes that have an MFU, because `peak_flops_per_s` in conf/hardware is the dense 16-bit peak."""


class Results:
    """Numbers of one record. Without a valid result, sections are None and there are no steps."""

    def __init__(self, record: Record, peaks: Mapping[str, float]) -> None:
        """Read a record; `peaks` has the peak FLOP/s by hardware name."""
        self.record = record
        self.is_ok = record.status is Status.OK
        self.is_predicted = record.provenance is Provenance.PREDICTED
        self.is_replayed = record.provenance is Provenance.REPLAYED
        self.timing: TimingSection | None = self._if_ok(record.timing)
        self.memory: MemorySection | None = self._if_ok(record.memory)
        self.losses: LossesSection | None = self._if_ok(record.losses)
        self.attention: AttentionSection | None = self._if_ok(record.attention)
        self.analytic: Analytic | None = self._if_ok(record.analytic)
        self.predicted: PredictedStep | None = record.analytic.prediction
        self._peak_flops_per_s = peaks.get(str(record.config.get("hardware")))

    def _if_ok(self, section: Any) -> Any:
        return section if self.is_ok else None

    @cached_property
    def steps_ms(self) -> list[float]:
        """Milliseconds of each timed step on its slowest rank, sorted; for a prediction the expected step."""
        return [] if self.timing is None else sorted(slowest_rank_times(self.timing.step_times_ms))

    @property
    def timed_steps(self) -> int | None:
        return None if self.timing is None or self.is_predicted else len(self.steps_ms)

    @cached_property
    def median_ms(self) -> float | None:
        return statistics.median(self.steps_ms) if self.steps_ms else None

    @cached_property
    def interval(self) -> Interval | None:
        """95 % interval of the median step time in ms; None for fewer than six steps and for a prediction."""
        return None if self.is_predicted else median_interval(self.steps_ms)

    @property
    def tokens(self) -> int | None:
        """Tokens of all ranks in one step."""
        return None if self.timing is None else self.timing.tokens_per_step

    def rate(self, step_ms: float | None) -> float | None:
        """Return the tokens/s of all ranks where a step takes `step_ms`."""
        return None if step_ms is None or self.tokens is None else tokens_per_s(self.tokens, step_ms)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of all ranks in all timed steps."""
        return None if self.tokens is None or self.timed_steps is None else self.tokens * self.timed_steps

    @property
    def window_tokens_per_s(self) -> float | None:
        """Tokens/s over the window of all timed steps, on the rank with the longest window."""
        if self.timing is None or self.window_tokens is None:
            return None
        return tokens_per_s(self.window_tokens, max(self.timing.window_ms))

    @property
    def warmup(self) -> str | None:
        return None if self.timing is None or self.is_predicted else self.timing.warmup

    @property
    def ranks(self) -> int:
        """Number of ranks of the cell, even where only one of them ran."""
        if self.is_predicted or self.is_replayed or self.timing is None:
            return int(self.record.config.get("cluster.world_size", 1))
        return len(self.timing.step_times_ms)

    @property
    def gpus(self) -> float | None:
        """Number of GPUs of the cell; None on a CPU. Ranks that share a GPU count as one."""
        config = self.record.config
        if config.get("cluster.device") != "cuda":
            return None
        return self.ranks / float(config.get("cluster.ranks_per_gpu") or 1)

    def gpu_hours(self, tokens: float) -> float | None:
        """Return the GPU-hours that a number of tokens takes.

        None on a CPU, without a rate, and for a replay, whose rate leaves out the link.
        """
        rate = self.rate(self.median_ms)
        if rate is None or self.gpus is None or self.is_replayed:
            return None
        return self.gpus * tokens / rate / SECONDS_PER_HOUR

    @cached_property
    def link(self) -> Band | None:
        """Modelled milliseconds on the link in one replayed step; None for other cells or an unknown link."""
        bands = None if self.analytic is None or self.timing is None else self.analytic.link_ms
        if bands is None:
            return None
        return Band.from_function(lambda end: sum(band.value_at(end) for band in bands.values()))

    @property
    def tokens_per_s_with_link(self) -> float | None:
        """Tokens/s if a replayed step took longer by the high end of the link's time; None without `link`."""
        link = self.link
        return None if link is None or self.median_ms is None else self.rate(self.median_ms + link.high)

    def utilisation(self, flops: float | None) -> float | None:
        """Return `flops` per median step over the peak FLOP/s of all ranks.

        None where a number or the peak of the dtype is unknown, and for a replay, because a step without the
        link uses more of the peak than a real step.
        """
        peak, has_peak = self._peak_flops_per_s, self.record.config.get("dtype") in PEAK_DTYPES
        if None in (flops, peak, self.median_ms) or self.is_replayed or not has_peak:
            return None
        return utilisation(flops or 0.0, self.median_ms or 0.0, self.ranks, peak or 0.0)

    @property
    def quality(self) -> QualitySection | None:
        """Scores of answers; None for a cell that has none or failed."""
        return self.record.quality if self.is_ok else None

    @cached_property
    def trace(self) -> TraceSection | None:
        """Section of the traced steps; None where tracing failed.

        Its times are those of the step of median length.
        """
        trace = self.record.trace if self.is_ok else None
        return None if trace is None or trace.failure is not None else trace

    @property
    def traced_to_timed(self) -> float | None:
        """Slowest rank's time of the traced step of median length, over the median timed step."""
        if self.trace is None or self.median_ms is None or self.is_predicted:
            return None
        return max(self.trace.step_ms) / self.median_ms

    @cached_property
    def valid_trace(self) -> TraceSection | None:
        """Section `trace`; None where the traced step of median length is too unlike a timed step."""
        ratio = self.traced_to_timed
        return None if ratio is not None and is_void(ratio) else self.trace

    @cached_property
    def shares(self) -> TracedShares | None:
        """Shares of communication in the traced steps; None for a prediction."""
        if self.trace is None or self.is_predicted:
            return None
        return traced_shares(self.trace, self.median_ms)

    @cached_property
    def attention_shares(self) -> PurposeShares | None:
        if self.is_predicted:
            return None if self.trace is None else expected_shares(self.trace, "attention")
        return None if self.shares is None else self.shares.attention

    @cached_property
    def communication_shares(self) -> PurposeShares | None:
        if self.is_predicted:
            return None if self.trace is None else expected_shares(self.trace)
        return None if self.shares is None else self.shares.communication

    def traced_share(self, times_ms: Callable[[TraceSection], Sequence[float] | None]) -> float | None:
        """Return the largest of the ranks' `times_ms` as a share of that rank's traced step, or None."""
        times = None if self.valid_trace is None else times_ms(self.valid_trace)
        if self.valid_trace is None or not times:
            return None
        worst_ms = max(times)
        return worst_ms / self.valid_trace.step_ms[times.index(worst_ms)]

    @property
    def straggler_gap_ms(self) -> float | None:
        """Traced step time of the slowest rank minus the median over ranks; None without a valid trace."""
        if self.valid_trace is None or self.is_predicted:
            return None
        return max(self.valid_trace.step_ms) - statistics.median(self.valid_trace.step_ms)

    @cached_property
    def parts(self) -> StepParts | None:
        return None if self.valid_trace is None else step_parts(self.valid_trace)

    @property
    def forward_ms(self) -> float | None:
        """Median time of a forward call of attention alone, on the slowest rank of each call."""
        return None if self.attention is None else slowest_median(self.attention.forward_ms)

    @property
    def backward_ms(self) -> float | None:
        """Median time of a backward call of attention alone, on the slowest rank of each call."""
        return None if self.attention is None else slowest_median(self.attention.backward_ms)

    @cached_property
    def both_ms(self) -> float | None:
        """Median time of a forward and backward call of attention alone, in milliseconds."""
        if self.attention is None:
            return None
        return _median_sum_ms(
            slowest_rank_times(self.attention.forward_ms), slowest_rank_times(self.attention.backward_ms)
        )

    @property
    def attention_flops_per_s(self) -> float | None:
        """FLOP/s of all ranks for the causal area; a backward counts as 2.5 forwards.

        Source: arXiv:2307.08691, section 4. None for a replay, because the time of one rank does not belong
        to the FLOPs of all ranks.
        """
        if self.analytic is None or self.both_ms is None or self.is_replayed:
            return None
        forward, backward = self.analytic.attention_forward_flops, self.analytic.attention_backward_flops
        return None if forward is None or backward is None else (forward + backward) / self.both_ms * 1e3

    @property
    def attention_of_one_device(self) -> float | None:
        """Parallel efficiency of attention alone.

        Time of a forward and backward call on one device, divided by `sp_degree`, over `both_ms`.
        """
        if self.attention is None or self.both_ms is None:
            return None
        forward_ms, backward_ms = self.attention.one_device_forward_ms, self.attention.one_device_backward_ms
        if forward_ms is None or backward_ms is None:
            return None
        sp_degree = float(self.record.config.get("sp_degree", 1))
        return _median_sum_ms(forward_ms, backward_ms) / sp_degree / self.both_ms

    @property
    def control_error_ulps(self) -> Mapping[str, float | None]:
        """Error in ulps of the control, the kernel alone on one device, for each tensor."""
        if self.attention is None or self.is_replayed:
            return {}
        return self.attention.control_error_ulps or {}

    @property
    def window_joules(self) -> float | None:
        """Joules of all GPUs in the timed window, from NVML's power samples; None with too few samples."""
        telemetry = self._if_ok(self.record.telemetry)
        if telemetry is None or telemetry.power_w is None or self.timing is None or self.is_replayed:
            return None
        if min(map(len, telemetry.power_w)) < MIN_POWER_SAMPLES:
            return None
        mean_w = sum(map(statistics.fmean, telemetry.power_w))
        ranks_per_gpu = float(self.record.config.get("cluster.ranks_per_gpu") or 1)
        return mean_w / ranks_per_gpu * max(self.timing.window_ms) / 1e3

    @property
    def checks(self) -> Sequence[Check] | None:
        """Checks of a valid result; None for a prediction."""
        checks: Sequence[Check] | None = self._if_ok(self.record.checks)
        return None if self.is_predicted else checks

    @property
    def checks_of_loop(self) -> str | None:
        """Sentence on the checks of an observed loop; None for a cell of a sweep."""
        return checks_sentence(self.checks) if self.checks and self.record.role is Role.OBSERVED else None

    @property
    def note(self) -> str | None:
        """Warnings about a result, or the reason why there is no result."""
        if not self.is_ok:
            return self.record.reason
        return None if self.is_predicted else note_of(self.record, self.steps_ms, self.shares)


def tokens_per_s(tokens: float, time_ms: float) -> float:
    """Return tokens per second from a number of tokens and the milliseconds that they took."""
    return tokens / time_ms * 1e3


def utilisation(flops: float, step_ms: float, ranks: int, peak_flops_per_s: float) -> float:
    """Return `flops` per step of `step_ms` over the peak FLOP/s of all ranks together."""
    return flops / (step_ms / 1e3 * ranks * peak_flops_per_s)


def _median_sum_ms(forward_ms: Sequence[float], backward_ms: Sequence[float]) -> float:
    """Return the median over calls of the forward time plus the backward time."""
    return statistics.median(map(sum, zip(forward_ms, backward_ms, strict=True)))
