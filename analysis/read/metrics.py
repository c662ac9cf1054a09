"""Every metric in one table: its column, how it is computed and reduced, and the page that explains it."""

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
    """Reduction of a cell's repeats to one value; all but the last take only repeats that worked."""

    MEDIAN = "median"
    RATE = "rate"
    """Median of the reciprocal, the time: rates are never averaged."""
    LOWEST = "lowest"
    HIGHEST = "highest"
    TOTAL = "total"
    FIRST = "first"
    """Parts of one step add up; medians of parts over several do not."""
    FIRST_OF_ALL = "first of all"
    """Also of repeats that failed."""


MEDIAN, RATE, LOWEST, HIGHEST, TOTAL, FIRST, FIRST_OF_ALL = Reduction


LISTED = frozenset({View.SUMMARY, View.DETAILS})
"""Views with room for every metric."""
LABELS: Mapping[str, Callable[[Any], str]] = {"bytes": bytes_label, "share": percent_label}
"""Labels by the end of a column's name; other columns are plain numbers."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a column of the frame and of summary.csv."""

    name: str
    """Name of the column, with its unit: `_ms`, `_bytes`."""
    quantity: Quantity
    """Name, unit, meaning and page."""
    from_record: FromRecord | None = None
    """Value of one record; None for a metric that is not computed from one record alone."""
    over_repeats: Reduction = MEDIAN
    format: Callable[[Any], str] | None = None
    """Value in a reader's words; None where the end of the name says it."""
    heading: str = ""
    """Heading of its column where it has a place in tables; the name without one."""
    shown_in: frozenset[View] = frozenset()
    """Views of the table of cells that show the metric by itself."""

    @property
    def is_text(self) -> bool:
        return self.format is text_label

    def text(self, value: Any) -> str:
        """Return a value in a reader's words; empty where it is missing."""
        return (self.format or LABELS.get(self.name.rpartition("_")[2], number_label))(value)


def _worst_rank(sizes: Callable[[MemorySection], Sequence[float] | None]) -> FromRecord:
    """Return the largest of the ranks' sizes."""
    return lambda r: None if r.memory is None else max(sizes(r.memory) or (), default=None)


def _resident_above_base(memory: MemorySection) -> list[int] | None:
    """Return each rank's resident bytes above those that it held before it built anything."""
    peaks, bases = memory.peak_resident_bytes, memory.base_resident_bytes
    return None if peaks is None or bases is None else [p - b for p, b in zip(peaks, bases, strict=True)]


def _error_ulps(name: str) -> FromRecord:
    return lambda r: None if r.attention is None else r.attention.error_ulps.get(name)


def _part(ms: Callable[[StepParts], float]) -> FromRecord:
    return lambda r: None if r.parts is None else ms(r.parts)


def _traced_share(times_ms: Callable[[TraceSection], Sequence[float] | None]) -> FromRecord:
    return lambda r: r.traced_share(times_ms)


def _purpose(name: str, *, exposed: bool) -> FromRecord:
    """Return the worst rank's share of a purpose; None where calls could not be joined to purposes."""

    def times_ms(trace: TraceSection) -> Sequence[float] | None:
        by_purpose = trace.purpose_exposed_ms if exposed else trace.purpose_total_ms
        return None if any(trace.purposes_unknown) else by_purpose.get(name, [0.0] * len(trace.step_ms))

    return _traced_share(times_ms)


def _shares(
    share: str,
    quantity: Quantity,
    found: Callable[[Results], PurposeShares | None],
    spread: Callable[[PurposeShares], Spread],
) -> tuple[Metric, ...]:
    """Return a share's median over the traced steps, its lowest and its highest, also over repeats."""

    def end(value: Callable[[Spread], float | None]) -> FromRecord:
        return lambda r: None if (shares := found(r)) is None else value(spread(shares))

    return (
        Metric(f"{share}_share", quantity, end(lambda s: s.median)),
        Metric(f"{share}_low_share", quantity, end(lambda s: s.low), LOWEST),
        Metric(f"{share}_high_share", quantity, end(lambda s: s.high), HIGHEST),
    )


def _attention(r: Results) -> PurposeShares | None:
    return r.attention_shares


def _communication(r: Results) -> PurposeShares | None:
    return r.communication_shares


def _band(column: str, band: Callable[[PredictedStep], Band], *, per_s: bool = False) -> tuple[Metric, ...]:
    """Return a predicted figure and both ends of its band; the repeats of a cell have the same."""

    def end(value: Callable[[Band], float]) -> FromRecord:
        def of(r: Results) -> float | None:
            if r.predicted is None:
                return None
            found = value(band(r.predicted))
            return tokens_per_s(r.record.analytic.tokens_per_step, found) if per_s else found

        return of

    low, high = end(lambda b: b.low), end(lambda b: b.high)
    ends = {"": end(lambda b: b.expected), "_low": high if per_s else low, "_high": low if per_s else high}
    return tuple(
        Metric(column.format(suffix), q.PREDICTION, value, FIRST_OF_ALL) for suffix, value in ends.items()
    )


def _utilisation(flops: Callable[[Analytic], float | None]) -> FromRecord:
    return lambda r: None if r.analytic is None else r.utilisation(flops(r.analytic))


def _checks(count: Callable[[Sequence[Check]], Any]) -> FromRecord:
    return lambda r: None if r.checks is None else count(r.checks)


def over(part: float | None, whole: float | None) -> float | None:
    """Return a ratio; None where either number is missing or nothing is divided by."""
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
    Metric("tokens_per_s_per_rank", q.TOKENS_PER_S, lambda r: over(r.rate(r.median_ms), r.ranks), RATE),
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
        "tokens_per_joule", q.ENERGY, lambda r: over(r.window_tokens, r.window_joules), RATE,
        heading="tokens/J", shown_in=LISTED,
    ),
    Metric("peak_allocated_bytes", q.ALLOCATED, _worst_rank(lambda m: m.peak_allocated_bytes)),
    Metric("peak_reserved_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.peak_reserved_bytes)),
    Metric("peak_resident_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.peak_resident_bytes)),
    Metric("resident_above_base_bytes", q.OTHER_MEMORY, _worst_rank(_resident_above_base)),
    Metric("whole_life_allocated_bytes", q.ALLOCATED, _worst_rank(lambda m: m.whole_life_allocated_bytes)),
    Metric("forward_peak_bytes", q.ALLOCATED, _worst_rank(lambda m: m.forward_peak_bytes)),
    Metric("backward_peak_bytes", q.ALLOCATED, _worst_rank(lambda m: m.backward_peak_bytes)),
    Metric("device_used_bytes", q.OTHER_MEMORY, _worst_rank(lambda m: m.device_used_bytes)),
    Metric("needed_bytes", q.SAVED_MEMORY, lambda r: r.analytic and r.analytic.needed_bytes, FIRST),
    Metric("offloaded_activation_bytes", q.SAVED_MEMORY, _worst_rank(lambda m: m.offloaded_activation_bytes)),
    Metric("offloaded_optimizer_bytes", q.SAVED_MEMORY, _worst_rank(lambda m: m.offloaded_optimizer_bytes)),
    *_shares("attention_transfer", q.ATTENTION_EXCHANGE_SHARE, _attention, lambda s: s.transfer),
    *_shares("attention_waiting", q.WAITING, _attention, lambda s: s.waiting),
    *_shares(
        "communication_transfer",
        q.COMMUNICATION_SHARE,
        lambda r: r.communication_shares,
        lambda s: s.transfer,
    ),
    *_shares("communication_waiting", q.WAITING, _communication, lambda s: s.waiting),
    Metric("traced_steps", q.TRACED_TO_TIMED, lambda r: r.shares and r.shares.steps, TOTAL),
    Metric("void_traced_steps", q.TRACED_TO_TIMED, lambda r: r.shares and len(r.shares.void_ratios), TOTAL),
    Metric("communication_in_flight_share", q.COMMUNICATION_SHARE, _traced_share(lambda t: t.total_ms)),
    Metric("communication_exposed_share", q.COMMUNICATION_SHARE, _traced_share(lambda t: t.exposed_ms)),
    Metric("attention_in_flight_share", q.ATTENTION_EXCHANGE_SHARE, _purpose("attention", exposed=False)),
    Metric("attention_exposed_share", q.ATTENTION_EXCHANGE_SHARE, _purpose("attention", exposed=True)),
    Metric("traced_to_timed", q.TRACED_TO_TIMED, lambda r: r.traced_to_timed, format=ratio_label),
    Metric("straggler_gap_ms", q.STRAGGLER_GAP, lambda r: r.straggler_gap_ms),
    Metric("mfu_causal", q.MFU, _utilisation(lambda a: a.model_flops_causal), RATE, percent_label),
    Metric("mfu_full", q.MFU, _utilisation(lambda a: a.model_flops_full), RATE, percent_label),
    Metric("hfu_causal", q.MFU, _utilisation(lambda a: a.hardware_flops_causal), RATE, percent_label),
    Metric("hfu_full", q.MFU, _utilisation(lambda a: a.hardware_flops_full), RATE, percent_label),
    Metric("first_loss", q.TRAINING_SIGNAL, lambda r: r.losses and r.losses.loss[0]),
    Metric("last_loss", q.TRAINING_SIGNAL, lambda r: r.losses and r.losses.loss[-1]),
    Metric("checks", q.CHECKS, _checks(len), FIRST),
    Metric("checks_made", q.CHECKS, _checks(checks.made), LOWEST),
    Metric("checks_missing", q.CHECKS, _checks(checks.missing), FIRST, text_label),
    Metric("checks_of_loop", q.CHECKS, lambda r: r.checks_of_loop, FIRST, text_label),
    Metric("steps", q.CHECKS, _checks(checks.steps), TOTAL),
    Metric("steps_compared", q.CHECKS, _checks(checks.compared_steps), TOTAL),
    Metric("compared_with", q.CHECKS, lambda r: r.losses and r.losses.compared_with, FIRST, text_label),
    Metric("note", q.STABILITY, lambda r: r.note, FIRST_OF_ALL, text_label),
    Metric("part_attention_ms", q.STEP_PARTS, _part(lambda p: p.attention), FIRST),
    Metric("part_imbalance_ms", q.WAITING, _part(lambda p: p.imbalance), FIRST),
    Metric("part_packing_ms", q.PACKING, _part(lambda p: p.packing), FIRST),
    Metric("part_transfer_ms", q.STEP_PARTS, _part(lambda p: p.transfer), FIRST),
    Metric("part_waiting_ms", q.WAITING, _part(lambda p: p.waiting), FIRST),
    Metric("part_model_state_ms", q.STEP_PARTS, _part(lambda p: p.model_state), FIRST),
    Metric("part_other_communication_ms", q.STEP_PARTS, _part(lambda p: p.other_communication), FIRST),
    Metric("part_optimizer_ms", q.STEP_PARTS, _part(lambda p: p.optimizer), FIRST),
    Metric("part_other_compute_ms", q.STEP_PARTS, _part(lambda p: p.other_compute), FIRST),
    Metric("part_copies_ms", q.STEP_PARTS, _part(lambda p: p.copies), FIRST),
    Metric("part_idle_ms", q.IDLE, _part(lambda p: p.idle), FIRST),
    *_band("predicted_step_time{}_ms", lambda p: p.step_time_ms),
    *_band("predicted_tokens_per_s{}", lambda p: p.step_time_ms, per_s=True),
    *_band("predicted_peak_allocated{}_bytes", lambda p: p.peak_allocated_bytes),
    *_band("predicted_needed{}_bytes", lambda p: p.needed_bytes),
    Metric(
        "predicted_fit", q.PREDICTION, lambda r: r.predicted and r.predicted.fit, FIRST_OF_ALL, text_label
    ),
    # Read from a record as it stands, or computed from the repeats of a cell and from other cells.
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
"""Metrics in the order of the columns; those computed from one record come first."""

METRICS: Mapping[str, Metric] = {each.name: each for each in METRIC_LIST}
OF_RECORD = tuple(each for each in METRIC_LIST if each.from_record is not None)
"""Metrics that are computed from one record; the others come with its identity, or from other cells."""
QUANTITIES = tuple(dict.fromkeys([*(each.quantity for each in METRIC_LIST), *q.WITHOUT_METRIC]))


def metrics_reduced(how: Reduction) -> list[str]:
    """Return the names of the metrics whose repeats are reduced in this way."""
    return [each.name for each in OF_RECORD if each.over_repeats is how]


def text_of(cell: Mapping[Any, Any], name: str) -> str:
    """Return a cell's value of a metric in a reader's words; empty where it is missing."""
    return METRICS[name].text(cell[name])


def meanings_of(names: Iterable[str]) -> list[str | None]:
    """Return the meaning of each column; None for one that is no metric."""
    found = map(METRICS.get, names)
    return [None if each is None else each.quantity.meaning for each in found]
