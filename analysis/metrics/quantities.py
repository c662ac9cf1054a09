"""What every measured number means, in one sentence each: tooltips and docs/quantities say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """One quantity: its page docs/quantities/<page>.md, its unit, and where its numbers stand.

    `columns` are the summary's, `fields` the record's, as `section.field`.
    """

    page: str
    name: str
    unit: str
    meaning: str
    columns: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


DEFINITIONS = (
    Definition(
        "tokens_per_second", "Tokens per second", "tokens/s",
        "Tokens of all whole sequences of a step, over the slowest rank's median step.",
        ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "tokens_per_s_per_rank",
         "window_tokens_per_s", "tokens_per_step", "tokens_per_s_lowest_repeat",
         "tokens_per_s_highest_repeat"),
        ("timing.tokens_per_step", "timing.window_ms"),
    ),
    Definition(
        "step_time", "Step time", "ms",
        "The median over the timed steps of what the slowest rank took, from batch fetch to zero_grad.",
        ("step_time_ms", "step_time_low_ms", "step_time_high_ms", "n_steps", "warmup"),
        ("timing.step_times_ms", "timing.warmup"),
    ),
    Definition(
        "samples", "Samples, repeats and the 95 % interval", "count",
        "How many samples a median is of: steps of the only repeat, or repeats; six give an interval.",
        ("n", "n_of", "repeats", "failed_repeats"),
    ),
    Definition(
        "mfu", "MFU and HFU", "fraction 0..1",
        "The FLOP/s that a step amounts to, over the dense 16-bit peak of all its GPUs together.",
        ("mfu_causal", "mfu_full", "hfu_causal", "hfu_full"),
    ),
    Definition(
        "peak_allocated", "Peak allocated memory", "bytes",
        "The most bytes that tensors held at once on the worst rank, once the cell runs at full length.",
        ("peak_allocated_bytes", "whole_life_allocated_bytes"),
        ("memory.peak_allocated_bytes", "memory.peak_phase", "memory.whole_life_allocated_bytes",
         "memory.whole_life_phase"),
    ),
    Definition(
        "other_memory", "Reserved, device-used and resident memory", "bytes",
        "What the allocator, the whole device and the process held, tensors or not, on the worst rank.",
        ("peak_reserved_bytes", "device_used_bytes", "peak_resident_bytes", "resident_above_base_bytes"),
        ("memory.peak_reserved_bytes", "memory.whole_life_reserved_bytes", "memory.device_used_bytes",
         "memory.device_used_reason", "memory.peak_resident_bytes", "memory.base_resident_bytes"),
    ),
    Definition(
        "capacity", "Memory capacity", "bytes, fraction",
        "The memory one rank may use, its limit or its device's, and the part of it that tensors reached.",
        ("capacity_bytes", "capacity_source", "capacity_share"),
    ),
    Definition(
        "out_of_memory", "Out of memory and the longest length that fits", "bytes, tokens",
        "The allocation that failed, what held memory then, and the longest length that was run without it.",
        (),
        ("failure.out_of_memory.memory", "failure.out_of_memory.requested_bytes",
         "failure.out_of_memory.limit_bytes", "failure.out_of_memory.held_bytes",
         "failure.out_of_memory.largest", "memory.limit_base_bytes"),
    ),
    Definition(
        "communication_share", "Communication share", "fraction 0..1",
        "The part of the traced step with communication in flight; exposed: with no compute on that rank.",
        ("communication_share", "exposed_communication_share"),
        ("trace.step_ms", "trace.total_ms", "trace.exposed_ms", "trace.communication_ms", "trace.calls"),
    ),
    Definition(
        "attention_exchange_share", "Attention exchange share", "fraction 0..1",
        "The part of the traced step with the attention exchange in flight; exposed: with no compute then.",
        ("attention_exchange_share", "exposed_attention_exchange_share"),
        ("trace.purpose_total_ms", "trace.purpose_exposed_ms", "trace.unjoined"),
    ),
    Definition(
        "waiting", "Waiting and load imbalance", "ms",
        "Time in which a rank was there and the last of those that had to meet it was not.",
        ("part_waiting_ms", "part_imbalance_ms"),
        ("trace.purpose_waiting_ms", "trace.purpose_exposed_waiting_ms"),
    ),
    Definition(
        "packing", "Packing", "ms",
        "Time of the operators inside attention that copy, arrange or convert and calculate nothing.",
        ("part_packing_ms",),
    ),
    Definition(
        "idle", "Idle time", "ms",
        "Time of the traced step in which a rank ran no operator or kernel and nothing was on its way.",
        ("part_idle_ms",),
        ("trace.idle_ms",),
    ),
    Definition(
        "step_parts", "Parts of a step", "ms",
        "The traced step of the rank that attention kept busiest, every instant booked once.",
        ("part_attention_ms", "part_transfer_ms", "part_model_state_ms", "part_other_exchange_ms",
         "part_optimizer_ms", "part_other_compute_ms"),
        ("trace.compute_ms",),
    ),
    Definition(
        "ideal_attention", "Ideal attention and the waterfall", "ms",
        "What local's attention took for the same work, divided by the cores or GPUs of the cell.",
        ("part_ideal_attention_ms", "part_block_efficiency_ms"),
    ),
    Definition(
        "straggler_gap", "Straggler gap", "ms",
        "How much longer the slowest rank's traced step took than the median rank's.",
        ("straggler_gap_ms",),
    ),
    Definition(
        "causal_area", "Causal area", "(query, key, head) triples",
        "How many (query, key, head) triples the causal mask leaves a rank, of one sequence and layer.",
        (),
        ("trace.causal_area",),
    ),
    Definition(
        "traced_to_timed", "Traced step over timed step", "ratio",
        "The slowest rank's traced step over the median timed step; above 1.2 the trace's shares are void.",
        ("traced_to_timed",),
    ),
    Definition(
        "payload", "Payload bytes", "bytes per step and rank",
        "What a rank hands to collectives in one step for others to have, each byte counted once.",
        (),
        ("engagement.sent_bytes", "engagement.calls", "engagement.attention_shapes", "engagement.modules",
         "engagement.attention_name"),
    ),
    Definition(
        "attention_parity", "Attention parity", "relative error",
        "How far the strategy's attention is from plain float64 attention, relative to the exact maximum.",
        (),
        ("parity.errors", "parity.limits", "parity.tokens", "parity.checked_in", "parity.reason"),
    ),
    Definition(
        "objective_parity", "Objective parity", "relative error",
        "How far loss and gradients of one step of a two-layer cut are from float64 on one rank.",
    ),
    Definition(
        "error_ulps", "Error in ulps", "ulps",
        "The largest deviation from float64 of sampled tokens, in ulps of the dtype at a row's maximum.",
        ("out_error_ulps", "dq_error_ulps", "control_out_error_ulps", "control_dq_error_ulps"),
        ("attention.error_rows", "attention.error_ulps", "attention.control_error_ulps"),
    ),
    Definition(
        "attention_alone", "Attention alone", "ms, FLOP/s, fraction",
        "One attention call, forward and backward, and how near it comes to one device's over the ranks.",
        ("attention_forward_ms", "attention_backward_ms", "attention_flops_per_s", "attention_of_single"),
        ("attention.forward_ms", "attention.backward_ms", "attention.single_forward_ms",
         "attention.single_backward_ms", "attention.single_reason"),
    ),
    Definition(
        "training_signal", "Loss, gradient norm and tokens", "nats per token, norm, count",
        "The mean loss per valid token of all ranks, the gradient's norm, and proof of the tokens they saw.",
        ("first_loss", "last_loss"),
        ("losses.loss", "losses.grad_norm", "losses.valid_tokens", "losses.tokens_digest",
         "losses.expected_digest"),
    ),
    Definition(
        "speed_up", "Speed-up", "ratio",
        "Tokens per second over those of the fastest local cell that did the same work on the same machine.",
        ("speed_up", "speed_up_base_cell_id", "speed_up_base_ranks"),
    ),
    Definition(
        "scaling", "Scaling", "ratio, fraction",
        "Tokens per second over those of the fewest ranks that did the same work, also per rank.",
        ("scaling_speed_up", "scaling_efficiency", "scaling_base_cell_id", "scaling_base_strategy",
         "scaling_base_ranks"),
    ),
    Definition(
        "telemetry", "Telemetry", "W, MHz, fraction, count",
        "What devices and machine did while the clock ran: power, clocks, throttling, load, lost cores.",
        (),
        ("telemetry.reason", "telemetry.throttled", "telemetry.sample_ms", "telemetry.power_w",
         "telemetry.sm_clock_mhz", "telemetry.reference_clock_mhz", "telemetry.utilisation",
         "telemetry.clock_events", "telemetry.foreign_processes", "telemetry.load_average",
         "telemetry.involuntary_switches"),
    ),
    Definition(
        "cell_time", "Time of a cell and its fixed cost", "s",
        "What a cell took from start to end, and what of it was not its own steps, checks and traces.",
        ("wall_s", "fixed_cost_s"),
        ("failure.found_after_s",),
    ),
    Definition(
        "harness_overhead", "What the harness costs", "ratio, s",
        "A timed step over the same step in a bare loop, and a cell's fixed cost over torchrun's.",
    ),
    Definition(
        "stability", "Flags on a cell", "text",
        "What a reader must know before trusting a number: unsteady steps, a busy machine, void shares.",
        ("note",),
    ),
    Definition(
        "sweep_ratio", "Ratio of two sweeps", "ratio",
        "The median time of a cell before over its median time after, with a bootstrapped 95 % interval.",
    ),
)  # fmt: skip
"""In the order in which a reader meets them."""

MEANINGS: Mapping[str, str] = {
    column: definition.meaning for definition in DEFINITIONS for column in definition.columns
}
"""Per column of the summary what it says; settings have no entry."""


def meanings_of(columns: Iterable[str]) -> list[str | None]:
    """The meaning of each column, None where it is no measured quantity."""
    return [MEANINGS.get(column) for column in columns]
