"""Table of all metrics: column, computation, reduction over repeats, and the quantity that explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from analysis.labels import (
    bytes_label,
    number_label,
    percent_label,
    ratio_label,
    signed_percent_label,
    teraflops_label,
    text_label,
)
from analysis.read import checks
from analysis.read import quantities as q
from analysis.read.quantities import Quantity
from analysis.read.results import Results, tokens_per_s
from analysis.read.step_parts import StepParts
from analysis.read.traced_shares import PurposeShares, Spread
from analysis.read.views import View
from bench.cost.band import Band
from bench.measure.check import Check
from bench.measure.memory.section import MemorySection
from bench.measure.trace.section import TraceSection
from bench.record.analytic import Analytic, PredictedStep

FromRecord = Callable[[Results], Any]


class Reduction(Enum):
    """Reduction of a cell's repeats to one value. All but the last use only repeats that succeeded."""

    MEDIAN = "median"
    RATE = "rate"
    """Reciprocal of the median time; rates are never averaged."""
    LOWEST = "lowest"
    HIGHEST = "highest"
    TOTAL = "total"
    FIRST = "first"
    """Value of the first repeat that has one. Parts of one step add up, and medians of parts do not."""
    FIRST_OF_ALL = "first of all"
    """Value of the first repeat that has one, whether or not the repeat succeeded."""


MEDIAN, RATE, LOWEST, HIGHEST, TOTAL, FIRST, FIRST_OF_ALL = Reduction

LISTED = frozenset({View.SUMMARY, View.DETAILS})
"""Views whose table of cells has room for many columns."""
LABELS: Mapping[str, Callable[[Any], str]] = {"bytes": bytes_label, "share": percent_label}
"""Functions for the text of a value, by the end of the column's name; other columns are plain numbers."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a column of the frame and of summary.csv."""

    name: str
    """Name of the column, which ends with the unit."""
    quantity: Quantity
    """Quantity that the metric measures, with its page."""
    from_record: FromRecord | None = None
    """Function that computes the metric from one record; None if it also needs other records."""
    over_repeats: Reduction = MEDIAN
    format: Callable[[Any], str] | None = None
    """Function for the text of a value; None where the end of the name determines it."""
    heading: str = ""
    """Heading of the column in tables; if empty, the name."""
    shown_in: frozenset[View] = frozenset()
    """Views whose table of cells has a column for the metric."""

    @property
    def is_text(self) -> bool:
        return self.format is text_label

    def text(self, value: Any) -> str:
        """Return the text of a value; empty where it is missing."""
        return (self.format or LABELS.get(self.name.rpartition("_")[2], number_label))(value)


def _worst_rank(sizes: Callable[[MemorySection], Sequence[float] | None]) -> FromRecord:
    """Return a function that computes the largest of the ranks' sizes; None where they are unknown."""
    return lambda r: None if r.memory is None else max(sizes(r.memory) or (), default=None)


def _resident_above_base(memory: MemorySection) -> list[int] | None:
    """Return each rank's peak resident bytes less those that it had before it built the model."""
    peaks, bases = memory.peak_resident_bytes, memory.base_resident_bytes
    return None if peaks is None or bases is None else [p - b for p, b in zip(peaks, bases, strict=True)]


def _error_ulps(name: str) -> FromRecord:
    return lambda r: None if r.attention is None else r.attention.error_ulps.get(name)


def _step_part(ms: Callable[[StepParts], float]) -> FromRecord:
    return lambda r: None if r.parts is None else ms(r.parts)


def _traced_share(times_ms: Callable[[TraceSection], Sequence[float] | None]) -> FromRecord:
    return lambda r: r.traced_share(times_ms)


def _purpose_share(purpose: str, *, exposed: bool) -> FromRecord:
    """Return a function for the largest share of a rank's step in which communication is in flight.

    The share counts communication for one purpose, or only its exposed part. It is None where purposes are
    unknown.
    """

    def times_ms(trace: TraceSection) -> Sequence[float] | None:
        by_purpose = trace.purpose_exposed_ms if exposed else trace.purpose_total_ms
        return None if any(trace.purposes_unknown) else by_purpose.get(purpose, [0.0] * len(trace.step_ms))

    return _traced_share(times_ms)


def _share_metrics(
    share: str,
    quantity: Quantity,
    shares_of: Callable[[Results], PurposeShares | None],
    spread_of: Callable[[PurposeShares], Spread],
) -> tuple[Metric, ...]:
    """Return metrics for the median, the lowest and the highest value of a share over the traced steps.

    Their names begin with `share`.
    """

    def value(of_spread: Callable[[Spread], float | None]) -> FromRecord:
        return lambda r: None if (shares := shares_of(r)) is None else of_spread(spread_of(shares))

    return (
        Metric(f"{share}_share", quantity, value(lambda s: s.median)),
        Metric(f"{share}_low_share", quantity, value(lambda s: s.low), LOWEST),
        Metric(f"{share}_high_share", quantity, value(lambda s: s.high), HIGHEST),
    )


def _attention(r: Results) -> PurposeShares | None:
    return r.attention_shares


def _communication(r: Results) -> PurposeShares | None:
    return r.communication_shares


def _band_metrics(
    column: str, band: Callable[[PredictedStep], Band], *, per_s: bool = False
) -> tuple[Metric, ...]:
    """Return metrics for a predicted value and both ends of its band. All repeats have the same prediction.

    Args:
        column: name of the columns, with {} for the suffix `_low` or `_high`.
        band: function for the band of a prediction.
        per_s: whether to convert step times to tokens/s, where the longest time gives the lowest rate.
    """

    def end(value: Callable[[Band], float]) -> FromRecord:
        def from_record(r: Results) -> float | None:
            if r.predicted is None:
                return None
            number = value(band(r.predicted))
            return tokens_per_s(r.record.analytic.tokens_per_step, number) if per_s else number

        return from_record

    low, high = end(lambda b: b.low), end(lambda b: b.high)
    ends = {"": end(lambda b: b.expected), "_low": high if per_s else low, "_high": low if per_s else high}
    return tuple(
        Metric(column.format(suffix), q.PREDICTION, value, FIRST_OF_ALL) for suffix, value in ends.items()
    )


def _utilisation(flops: Callable[[Analytic], float | None]) -> FromRecord:
    return lambda r: None if r.analytic is None else r.utilisation(flops(r.analytic))


def _checks(summary_of: Callable[[Sequence[Check]], Any]) -> FromRecord:
    return lambda r: None if r.checks is None else summary_of(r.checks)


def _ratio(part: float | None, whole: float | None) -> float | None:
    """Return a ratio; None where a number is missing or `whole` is 0."""
    return None if part is None or not whole else part / whole


METRIC_LIST: Sequence[Metric] = (
    # Computed from one record.
    Metric("attention_forward_ms", q.ATTENTION_ALONE, lambda r: r.forward_ms),
    Metric("attention_backward_ms", q.ATTENTION_ALONE, lambda r: r.backward_ms),
    Metric(
        "attention_flops_per_s", q.ATTENTION_ALONE, lambda r: r.attention_flops_per_s, format=teraflops_label
    ),
    Metric(
        "attention_of_one_device",
        q.ATTENTION_ALONE,
        lambda r: r.attention_of_one_device,
        format=percent_label,
    ),
    Metric("out_error_ulps", q.ERROR_ULPS, _error_ulps("out")),
    Metric("dq_error_ulps", q.ERROR_ULPS, _error_ulps("dq")),
    Metric("control_out_error_ulps", q.ERROR_ULPS, lambda r: r.control_error_ulps.get("out")),
    Metric("control_dq_error_ulps", q.ERROR_ULPS, lambda r: r.control_error_ulps.get("dq")),
    Metric("n_steps", q.STEP_TIME, lambda r: r.timed_steps, FIRST),
    Metric("warmup", q.STEP_TIME, lambda r: r.warmup, FIRST, text_label),
    Metric("tokens_per_step", q.TOKENS_PER_S, lambda r: r.tokens, FIRST),
    Metric("step_time_ms", q.STEP_TIME, lambda r: r.median_ms),
    Metric("step_time_low_ms", q.STEP_TIME, lambda r: r.interval and r.interval.low, FIRST),
    Metric("step_time_high_ms", q.STEP_TIME, lambda r: r.interval and r.interval.high, FIRST),
    Metric("tokens_per_s", q.TOKENS_PER_S, lambda r: r.rate(r.median_ms), RATE),
    Metric("tokens_per_s_low", q.TOKENS_PER_S, lambda r: r.interval and r.rate(r.interval.high), FIRST),
    Metric("tokens_per_s_high", q.TOKENS_PER_S, lambda r: r.interval and r.rate(r.interval.low), FIRST),
    Metric("tokens_per_s_per_rank", q.TOKENS_PER_S, lambda r: _ratio(r.rate(r.median_ms), r.ranks), RATE),
    Metric("window_tokens_per_s", q.TOKENS_PER_S, lambda r: r.window_tokens_per_s, RATE),
    Metric("link_ms", q.REPLAY, lambda r: r.link and r.link.expected, FIRST),
    Metric("link_low_ms", q.REPLAY, lambda r: r.link and r.link.low, FIRST),
    Metric("link_high_ms", q.REPLAY, lambda r: r.link and r.link.high, FIRST),
    Metric("tokens_per_s_with_link", q.REPLAY, lambda r: r.tokens_per_s_with_link, RATE),
    Metric(
        "gpu_hours_per_billion_tokens", q.GPU_HOURS, lambda r: r.gpu_hours(1e9),
        heading="GPU-hours per billion tokens", shown_in=LISTED,
    ),
    Metric(
        "tokens_per_joule", q.ENERGY, lambda r: _ratio(r.window_tokens, r.window_joules), RATE,
        heading="tokens/J", shown_in=LISTED,
    ),
    Metric("peak_allocated_bytes", q.PEAK_ALLOCATED, _worst_rank(lambda m: m.peak_allocated_bytes)),
    Metric("peak_reserved_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.peak_reserved_bytes)),
    Metric("peak_resident_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.peak_resident_bytes)),
    Metric("resident_above_base_bytes", q.OTHER_MEMORY, _worst_rank(_resident_above_base)),
    Metric("outside_allocator_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.outside_allocator_bytes)),
    Metric(
        "whole_life_allocated_bytes",
        q.PEAK_ALLOCATED,
        _worst_rank(lambda m: m.whole_life_allocated_bytes),
    ),
    Metric("forward_peak_bytes", q.PEAK_ALLOCATED, _worst_rank(lambda m: m.forward_peak_bytes)),
    Metric("backward_peak_bytes", q.PEAK_ALLOCATED, _worst_rank(lambda m: m.backward_peak_bytes)),
    Metric("device_used_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.device_used_bytes)),
    Metric("needed_bytes", q.SAVED_MEMORY, lambda r: r.analytic and r.analytic.needed_bytes, FIRST),
    Metric("offloaded_activation_bytes", q.SAVED_MEMORY, _worst_rank(lambda m: m.offloaded_activation_bytes)),
    Metric("offloaded_optimizer_bytes", q.SAVED_MEMORY, _worst_rank(lambda m: m.offloaded_optimizer_bytes)),
    *_share_metrics("attention_transfer", q.ATTENTION_COMMUNICATION_SHARE, _attention, lambda s: s.transfer),
    *_share_metrics("attention_waiting", q.WAITING, _attention, lambda s: s.waiting),
    *_share_metrics(
        "communication_transfer",
        q.COMMUNICATION_SHARE,
        _communication,
        lambda s: s.transfer,
    ),
    *_share_metrics("communication_waiting", q.WAITING, _communication, lambda s: s.waiting),
    Metric("traced_steps", q.TRACED_TO_TIMED, lambda r: r.shares and r.shares.steps, TOTAL),
    Metric("void_traced_steps", q.TRACED_TO_TIMED, lambda r: r.shares and len(r.shares.void_ratios), TOTAL),
    Metric("communication_in_flight_share", q.COMMUNICATION_SHARE, _traced_share(lambda t: t.total_ms)),
    Metric("communication_exposed_share", q.COMMUNICATION_SHARE, _traced_share(lambda t: t.exposed_ms)),
    Metric(
        "attention_in_flight_share",
        q.ATTENTION_COMMUNICATION_SHARE,
        _purpose_share("attention", exposed=False),
    ),
    Metric(
        "attention_exposed_share", q.ATTENTION_COMMUNICATION_SHARE, _purpose_share("attention", exposed=True)
    ),
    Metric("traced_to_timed", q.TRACED_TO_TIMED, lambda r: r.traced_to_timed, format=ratio_label),
    Metric("straggler_gap_ms", q.STRAGGLER_GAP, lambda r: r.straggler_gap_ms),
    Metric("mfu_causal", q.MFU, _utilisation(lambda a: a.model_flops_causal), RATE, percent_label),
    Metric("mfu_full", q.MFU, _utilisation(lambda a: a.model_flops_full), RATE, percent_label),
    Metric("hfu_causal", q.MFU, _utilisation(lambda a: a.hardware_flops_causal), RATE, percent_label),
    Metric("hfu_full", q.MFU, _utilisation(lambda a: a.hardware_flops_full), RATE, percent_label),
    Metric("first_loss", q.TRAINING_SIGNAL, lambda r: r.losses and r.losses.loss[0]),
    Metric("last_loss", q.TRAINING_SIGNAL, lambda r: r.losses and r.losses.loss[-1]),
    Metric("right_answers_share", q.SCORES, lambda r: r.quality and r.quality.whole.right_share),
    Metric("answer_nats", q.SCORES, lambda r: r.quality and r.quality.answer_nats),
    Metric("checks", q.CHECKS, _checks(len), FIRST),
    Metric("checks_made", q.CHECKS, _checks(checks.made_count), LOWEST),
    Metric("checks_missing", q.CHECKS, _checks(checks.missing_checks), FIRST, text_label),
    Metric("checks_of_loop", q.CHECKS, lambda r: r.checks_of_loop, FIRST, text_label),
    Metric("steps", q.CHECKS, _checks(checks.step_count), TOTAL),
    Metric("steps_compared", q.CHECKS, _checks(checks.compared_step_count), TOTAL),
    Metric("compared_with", q.CHECKS, lambda r: r.losses and r.losses.compared_with, FIRST, text_label),
    Metric("note", q.STABILITY, lambda r: r.note, FIRST_OF_ALL, text_label),
    Metric("part_attention_ms", q.STEP_PARTS, _step_part(lambda p: p.attention), FIRST),
    Metric("part_imbalance_ms", q.WAITING, _step_part(lambda p: p.imbalance), FIRST),
    Metric("part_packing_ms", q.PACKING, _step_part(lambda p: p.packing), FIRST),
    Metric("part_transfer_ms", q.STEP_PARTS, _step_part(lambda p: p.transfer), FIRST),
    Metric("part_waiting_ms", q.WAITING, _step_part(lambda p: p.waiting), FIRST),
    Metric("part_model_state_ms", q.STEP_PARTS, _step_part(lambda p: p.model_state), FIRST),
    Metric("part_other_communication_ms", q.STEP_PARTS, _step_part(lambda p: p.other_communication), FIRST),
    Metric("part_optimizer_ms", q.STEP_PARTS, _step_part(lambda p: p.optimizer), FIRST),
    Metric("part_other_compute_ms", q.STEP_PARTS, _step_part(lambda p: p.other_compute), FIRST),
    Metric("part_copies_ms", q.STEP_PARTS, _step_part(lambda p: p.copies), FIRST),
    Metric("part_idle_ms", q.IDLE, _step_part(lambda p: p.idle), FIRST),
    *_band_metrics("predicted_step_time{}_ms", lambda p: p.step_time_ms),
    *_band_metrics("predicted_tokens_per_s{}", lambda p: p.step_time_ms, per_s=True),
    *_band_metrics("predicted_peak_allocated{}_bytes", lambda p: p.peak_allocated_bytes),
    *_band_metrics("predicted_needed{}_bytes", lambda p: p.needed_bytes),
    Metric(
        "predicted_fit", q.PREDICTION, lambda r: r.predicted and r.predicted.fit, FIRST_OF_ALL, text_label
    ),
    # Read from a record, or computed from the repeats of a cell and from other cells.
    Metric("wall_s", q.CELL_TIME),
    Metric("fixed_cost_s", q.CELL_TIME),
    Metric("repeats", q.SAMPLES),
    Metric("failed_repeats", q.SAMPLES),
    Metric("n", q.SAMPLES),
    Metric("n_of", q.SAMPLES, format=text_label),
    Metric("tokens_per_s_lowest_repeat", q.TOKENS_PER_S),
    Metric("tokens_per_s_highest_repeat", q.TOKENS_PER_S),
    Metric("capacity_bytes", q.CAPACITY),
    Metric("capacity_source", q.CAPACITY, format=text_label),
    Metric("capacity_share", q.CAPACITY),
    Metric("speed_up", q.SPEED_UP, format=ratio_label),
    Metric("speed_up_base_cell_id", q.SPEED_UP, format=text_label),
    Metric("speed_up_base_ranks", q.SPEED_UP),
    Metric(
        "over_data_parallel", q.OVER_DATA_PARALLEL, format=ratio_label,
        heading="over data parallelism", shown_in=LISTED,
    ),
    Metric("over_data_parallel_base_cell_id", q.OVER_DATA_PARALLEL, format=text_label),
    Metric("scaling_base_cell_id", q.SCALING, format=text_label),
    Metric("scaling_base_strategy", q.SCALING, format=text_label),
    Metric("scaling_base_ranks", q.SCALING),
    Metric("scaling_speed_up", q.SCALING, format=ratio_label),
    Metric("scaling_efficiency", q.SCALING, format=percent_label),
    Metric("step_time_error_share", q.PREDICTION_ERROR, format=signed_percent_label),
    Metric("step_time_in_band", q.PREDICTION_ERROR, format=text_label),
    Metric("peak_allocated_error_share", q.PREDICTION_ERROR, format=signed_percent_label),
    Metric("predicted_fit_outcome", q.PREDICTION_ERROR, format=text_label),
    Metric("part_ideal_attention_ms", q.IDEAL_ATTENTION),
    Metric("part_attention_beyond_ideal_ms", q.IDEAL_ATTENTION),
    Metric("ideal_attention_share", q.IDEAL_ATTENTION, heading="ideal / measured attention", shown_in=LISTED),
)  # fmt: skip
"""Metrics in the order of their columns; metrics that are computed from one record come first."""

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in METRIC_LIST}
RECORD_METRICS = tuple(metric for metric in METRIC_LIST if metric.from_record is not None)
"""Metrics that are computed from one record alone."""
QUANTITIES = tuple(dict.fromkeys([*(metric.quantity for metric in METRIC_LIST), *q.WITHOUT_METRIC]))


def metrics_reduced(reduction: Reduction) -> list[str]:
    """Return the names of the metrics with this reduction over repeats."""
    return [metric.name for metric in RECORD_METRICS if metric.over_repeats is reduction]


def metric_text(cell: Mapping[Any, Any], name: str) -> str:
    """Return the text of a cell's value of a metric; empty where the value is missing."""
    return METRICS[name].text(cell[name])


def meanings_of(names: Iterable[str]) -> list[str | None]:
    """Return the meaning of each column; None for a column that is not a metric."""
    return [METRICS[name].quantity.meaning if name in METRICS else None for name in names]
