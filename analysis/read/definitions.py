"""Every metric in one table: its column, how it is computed and reduced, and the page that explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from analysis.read import quantities as q
from analysis.read.measured import Measured, resident_above_base, worst_rank
from analysis.read.quantities import Quantity


class Reduction(Enum):
    """How the repeats of a cell become one value; all but the last are over those that worked."""

    MEDIAN = "median"
    RATE = "rate"
    """The median of its reciprocal, the time: rates are never averaged."""
    LOWEST = "lowest"
    HIGHEST = "highest"
    TOTAL = "total"
    FIRST = "first"
    """Parts of one step add up; medians of parts over several do not."""
    FIRST_OF_ALL = "first of all"
    """Also of repeats that failed."""


MEDIAN, RATE, LOWEST, HIGHEST, TOTAL, FIRST, FIRST_OF_ALL = Reduction
LABELS: Mapping[str, Callable[[Any], str]] = {"bytes": bytes_label, "share": percent_label}
"""By what a column's name ends with; the others are plain numbers."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: a column of the frame and of summary.csv."""

    column: str
    """Named with its unit: `_ms`, `_bytes`."""
    quantity: Quantity
    source: str | None = None
    """What of Measured it is computed from; None where it is not computed from one record alone."""
    of: Callable[[Any], Any] | None = None
    """Its value, of that; None where that is the value."""
    over_repeats: Reduction = MEDIAN
    label: Callable[[Any], str] | None = None
    """Its value in a reader's words; None where the end of the column says it."""

    @property
    def is_text(self) -> bool:
        return self.label is text_label

    def text(self, value: Any) -> str:
        """A value in a reader's words; empty where it is missing."""
        return (self.label or LABELS.get(self.column.rpartition("_")[2], number_label))(value)

    def value_of(self, found: Measured) -> Any:
        """Its value of one record, None where it is missing."""
        value: Any = found
        for name in str(self.source).split("."):
            if value is None:
                return None
            value = getattr(value, name)
        return value if self.of is None or value is None else self.of(value)


def _of_traced_steps(share: str, quantity: Quantity, source: str) -> tuple[Definition, ...]:
    """A share's median over the traced steps, its lowest and its highest, also over those of repeats."""
    return (
        Definition(f"{share}_share", quantity, f"{source}.median"),
        Definition(f"{share}_low_share", quantity, f"{source}.low", over_repeats=LOWEST),
        Definition(f"{share}_high_share", quantity, f"{source}.high", over_repeats=HIGHEST),
    )


def _of_band(column: str, source: str) -> tuple[Definition, ...]:
    """A predicted figure and both ends of its band; the repeats of a cell have the same."""
    ends = {"": "expected", "_low": "low", "_high": "high"}
    return tuple(
        Definition(column.format(end), q.PREDICTION, f"{source}.{name}", over_repeats=FIRST_OF_ALL)
        for end, name in ends.items()
    )


DEFINITIONS = (
    # Of one record.
    Definition("attention_forward_ms", q.ATTENTION_ALONE, "calls.forward_ms"),
    Definition("attention_backward_ms", q.ATTENTION_ALONE, "calls.backward_ms"),
    Definition("attention_flops_per_s", q.ATTENTION_ALONE, "calls.flops_per_s", label=teraflops_label),
    Definition("attention_of_single", q.ATTENTION_ALONE, "calls.of_single", label=percent_label),
    Definition("out_error_ulps", q.ERROR_ULPS, "calls.error_ulps.out"),
    Definition("dq_error_ulps", q.ERROR_ULPS, "calls.error_ulps.dq"),
    Definition("control_out_error_ulps", q.ERROR_ULPS, "control_error_ulps.out"),
    Definition("control_dq_error_ulps", q.ERROR_ULPS, "control_error_ulps.dq"),
    Definition("n_steps", q.STEP_TIME, "steps.timed", over_repeats=FIRST),
    Definition("warmup", q.STEP_TIME, "steps.warmup", over_repeats=FIRST, label=text_label),
    Definition("tokens_per_step", q.TOKENS_PER_S, "steps.tokens", over_repeats=FIRST),
    Definition("step_time_ms", q.STEP_TIME, "steps.median_ms"),
    Definition("step_time_low_ms", q.STEP_TIME, "steps.low_ms", over_repeats=FIRST),
    Definition("step_time_high_ms", q.STEP_TIME, "steps.high_ms", over_repeats=FIRST),
    Definition("tokens_per_s", q.TOKENS_PER_S, "steps.tokens_per_s", over_repeats=RATE),
    Definition("tokens_per_s_low", q.TOKENS_PER_S, "steps.tokens_per_s_low", over_repeats=FIRST),
    Definition("tokens_per_s_high", q.TOKENS_PER_S, "steps.tokens_per_s_high", over_repeats=FIRST),
    Definition("tokens_per_s_per_rank", q.TOKENS_PER_S, "steps.tokens_per_s_per_rank", over_repeats=RATE),
    Definition("window_tokens_per_s", q.TOKENS_PER_S, "steps.window_tokens_per_s", over_repeats=RATE),
    Definition("link_ms", q.REPLAY, "link.expected_ms", over_repeats=FIRST),
    Definition("link_low_ms", q.REPLAY, "link.low_ms", over_repeats=FIRST),
    Definition("link_high_ms", q.REPLAY, "link.high_ms", over_repeats=FIRST),
    Definition("tokens_per_s_with_link", q.REPLAY, "link.tokens_per_s", over_repeats=RATE),
    Definition("peak_allocated_bytes", q.ALLOCATED, "memory.peak_allocated_bytes", worst_rank),
    Definition("peak_reserved_bytes", q.OTHER_MEMORY, "memory.peak_reserved_bytes", worst_rank),
    Definition("peak_resident_bytes", q.OTHER_MEMORY, "memory.peak_resident_bytes", worst_rank),
    Definition("resident_above_base_bytes", q.OTHER_MEMORY, "memory", resident_above_base),
    Definition("whole_life_allocated_bytes", q.ALLOCATED, "memory.whole_life_allocated_bytes", worst_rank),
    Definition("forward_taken_bytes", q.ALLOCATED, "memory.forward_taken_bytes", worst_rank),
    Definition("backward_taken_bytes", q.ALLOCATED, "memory.backward_taken_bytes", worst_rank),
    Definition("device_used_bytes", q.OTHER_MEMORY, "memory.device_used_bytes", worst_rank),
    Definition("needed_bytes", q.SAVED_MEMORY, "needed_bytes", over_repeats=FIRST),
    Definition(
        "offloaded_activation_bytes", q.SAVED_MEMORY, "memory.offloaded_activation_bytes", worst_rank
    ),
    Definition("offloaded_optimizer_bytes", q.SAVED_MEMORY, "memory.offloaded_optimizer_bytes", worst_rank),
    *_of_traced_steps("attention_transfer", q.ATTENTION_EXCHANGE_SHARE, "exchange_shares.transfer"),
    *_of_traced_steps("attention_waiting", q.WAITING, "exchange_shares.waiting"),
    *_of_traced_steps("communication_transfer", q.COMMUNICATION_SHARE, "communication_shares.transfer"),
    *_of_traced_steps("communication_waiting", q.WAITING, "communication_shares.waiting"),
    Definition("traced_steps", q.TRACED_TO_TIMED, "shares.steps", over_repeats=TOTAL),
    Definition("void_traced_steps", q.TRACED_TO_TIMED, "shares.void_steps", over_repeats=TOTAL),
    Definition("communication_share", q.COMMUNICATION_SHARE, "communication.total"),
    Definition("exposed_communication_share", q.COMMUNICATION_SHARE, "communication.exposed"),
    Definition("attention_exchange_share", q.ATTENTION_EXCHANGE_SHARE, "exchange.total"),
    Definition("exposed_attention_exchange_share", q.ATTENTION_EXCHANGE_SHARE, "exchange.exposed"),
    Definition("traced_to_timed", q.TRACED_TO_TIMED, "traced_to_timed", label=ratio_label),
    Definition("straggler_gap_ms", q.STRAGGLER_GAP, "straggler_gap_ms"),
    Definition("mfu_causal", q.MFU, "utilisation.mfu_causal", over_repeats=RATE, label=percent_label),
    Definition("mfu_full", q.MFU, "utilisation.mfu_full", over_repeats=RATE, label=percent_label),
    Definition("hfu_causal", q.MFU, "utilisation.hfu_causal", over_repeats=RATE, label=percent_label),
    Definition("hfu_full", q.MFU, "utilisation.hfu_full", over_repeats=RATE, label=percent_label),
    Definition("first_loss", q.TRAINING_SIGNAL, "losses.first"),
    Definition("last_loss", q.TRAINING_SIGNAL, "losses.last"),
    Definition("checks", q.CHECKS, "checked.listed", over_repeats=FIRST),
    Definition("checks_made", q.CHECKS, "checked.made", over_repeats=LOWEST),
    Definition("checks_missing", q.CHECKS, "checked.missing", over_repeats=FIRST, label=text_label),
    Definition("checks_told", q.CHECKS, "checks_told", over_repeats=FIRST, label=text_label),
    Definition("steps", q.CHECKS, "checked.steps", over_repeats=TOTAL),
    Definition("steps_held", q.CHECKS, "checked.held", over_repeats=TOTAL),
    Definition("held_against", q.CHECKS, "losses.held_against", over_repeats=FIRST, label=text_label),
    Definition("note", q.STABILITY, "note", over_repeats=FIRST_OF_ALL, label=text_label),
    Definition("part_attention_ms", q.STEP_PARTS, "parts.attention", over_repeats=FIRST),
    Definition("part_imbalance_ms", q.WAITING, "parts.imbalance", over_repeats=FIRST),
    Definition("part_packing_ms", q.PACKING, "parts.packing", over_repeats=FIRST),
    Definition("part_transfer_ms", q.STEP_PARTS, "parts.transfer", over_repeats=FIRST),
    Definition("part_waiting_ms", q.WAITING, "parts.waiting", over_repeats=FIRST),
    Definition("part_model_state_ms", q.STEP_PARTS, "parts.model_state", over_repeats=FIRST),
    Definition("part_other_exchange_ms", q.STEP_PARTS, "parts.other_exchange", over_repeats=FIRST),
    Definition("part_optimizer_ms", q.STEP_PARTS, "parts.optimizer", over_repeats=FIRST),
    Definition("part_other_compute_ms", q.STEP_PARTS, "parts.other_compute", over_repeats=FIRST),
    Definition("part_copies_ms", q.STEP_PARTS, "parts.copies", over_repeats=FIRST),
    Definition("part_idle_ms", q.IDLE, "parts.idle", over_repeats=FIRST),
    *_of_band("predicted_step_time{}_ms", "predicted.step_time_ms"),
    *_of_band("predicted_tokens_per_s{}", "predicted_tokens_per_s"),
    *_of_band("predicted_peak_allocated{}_bytes", "predicted.peak_allocated_bytes"),
    *_of_band("predicted_needed{}_bytes", "predicted.needed_bytes"),
    Definition("predicted_fit", q.PREDICTION, "predicted.fit", over_repeats=FIRST_OF_ALL, label=text_label),
    # Of a record as it stands, of a cell's repeats, and of a cell beside others.
    Definition("wall_s", q.CELL_TIME),
    Definition("fixed_cost_s", q.CELL_TIME),
    Definition("repeats", q.SAMPLES),
    Definition("failed_repeats", q.SAMPLES),
    Definition("n", q.SAMPLES),
    Definition("n_of", q.SAMPLES, label=text_label),
    Definition("tokens_per_s_lowest_repeat", q.TOKENS_PER_S),
    Definition("tokens_per_s_highest_repeat", q.TOKENS_PER_S),
    Definition("capacity_bytes", q.CAPACITY),
    Definition("capacity_source", q.CAPACITY, label=text_label),
    Definition("capacity_share", q.CAPACITY),
    Definition("speed_up", q.SPEED_UP, label=ratio_label),
    Definition("speed_up_base_cell_id", q.SPEED_UP, label=text_label),
    Definition("speed_up_base_ranks", q.SPEED_UP),
    Definition("scaling_base_cell_id", q.SCALING, label=text_label),
    Definition("scaling_base_strategy", q.SCALING, label=text_label),
    Definition("scaling_base_ranks", q.SCALING),
    Definition("scaling_speed_up", q.SCALING, label=ratio_label),
    Definition("scaling_efficiency", q.SCALING, label=percent_label),
    Definition("step_time_error_share", q.PREDICTION_ERROR, label=signed_percent_label),
    Definition("step_time_in_band", q.PREDICTION_ERROR, label=text_label),
    Definition("peak_allocated_error_share", q.PREDICTION_ERROR, label=signed_percent_label),
    Definition("predicted_fit_outcome", q.PREDICTION_ERROR, label=text_label),
    Definition("part_ideal_attention_ms", q.IDEAL_ATTENTION),
    Definition("part_block_efficiency_ms", q.IDEAL_ATTENTION),
)  # fmt: skip
"""In the order of the columns; those of one record stand first."""

QUANTITIES = tuple(dict.fromkeys([*(each.quantity for each in DEFINITIONS), *q.WITHOUT_METRIC]))
BY_COLUMN: Mapping[str, Definition] = {each.column: each for each in DEFINITIONS}
OF_RECORD = tuple(each for each in DEFINITIONS if each.source is not None)
"""The metrics that are computed from one record; the others come with its identity, or from other cells."""


def columns_reduced(how: Reduction) -> list[str]:
    """The columns whose repeats are reduced in this way."""
    return [each.column for each in OF_RECORD if each.over_repeats is how]


def text_of(cell: Mapping[Any, Any], column: str) -> str:
    """A cell's value in a reader's words; empty where it is missing."""
    return BY_COLUMN[column].text(cell[column])


def meanings_of(columns: Iterable[str]) -> list[str | None]:
    """The meaning of each column, None where it is no measured quantity."""
    found = map(BY_COLUMN.get, columns)
    return [None if each is None else each.quantity.meaning for each in found]
