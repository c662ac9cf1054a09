"""What is measured, in a reader's words: each quantity has a page in docs/quantities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity, which may have several metrics."""

    page: str
    """docs/quantities/<page>.md says more."""
    name: str
    unit: str
    meaning: str
    """One sentence; tooltips and the page say the same."""


TOKENS_PER_S = Quantity(
    "tokens_per_second", "Tokens per second", "tokens/s",
    "Tokens of all whole sequences of a step, over the slowest rank's median step.",
)  # fmt: skip
STEP_TIME = Quantity(
    "step_time", "Step time", "ms",
    "The median over the timed steps of what the slowest rank took, from batch fetch to zero_grad.",
)  # fmt: skip
SAMPLES = Quantity(
    "samples", "Samples, repeats and the 95 % interval", "count",
    "How many samples a median is of: steps of the only repeat, or repeats; six give an interval.",
)  # fmt: skip
MFU = Quantity(
    "mfu", "MFU and HFU", "fraction 0..1",
    "The FLOP/s that a step amounts to, over the dense 16-bit peak of all its GPUs together.",
)  # fmt: skip
ALLOCATED = Quantity(
    "peak_allocated", "Peak allocated memory", "bytes",
    "The most bytes that tensors held at once on the worst rank, once the cell runs at full length.",
)  # fmt: skip
OTHER_MEMORY = Quantity(
    "other_memory", "Reserved, device-used and resident memory", "bytes",
    "What the allocator, the whole device and the process held, tensors or not, on the worst rank.",
)  # fmt: skip
SAVED_MEMORY = Quantity(
    "saved_memory", "Saved memory and offloaded bytes", "bytes",
    "What one switch takes off the peak, measured and by the formula, and what offloading has to move.",
)  # fmt: skip
CAPACITY = Quantity(
    "capacity", "Memory capacity", "bytes, fraction",
    "The memory one rank may use, its limit or its device's, and the part of it that tensors reached.",
)  # fmt: skip
OUT_OF_MEMORY = Quantity(
    "out_of_memory", "Out of memory and the longest length that fits", "bytes, tokens",
    "The allocation that failed, what held memory then, and the longest length that was run without it.",
)  # fmt: skip
COMMUNICATION_SHARE = Quantity(
    "communication_share", "Communication share", "fraction 0..1",
    "The part of the traced steps in which data moved for any purpose and no compute hid it.",
)  # fmt: skip
ATTENTION_EXCHANGE_SHARE = Quantity(
    "attention_exchange_share", "Attention exchange share", "fraction 0..1",
    "The part of the traced steps in which data moved for attention and no compute hid it.",
)  # fmt: skip
WAITING = Quantity(
    "waiting", "Waiting and load imbalance", "ms, fraction 0..1",
    "Time in which a rank was there and the last of those that had to meet it was not.",
)  # fmt: skip
PACKING = Quantity(
    "packing", "Packing", "ms",
    "Time of the operators inside attention that copy, arrange or convert and calculate nothing.",
)  # fmt: skip
IDLE = Quantity(
    "idle", "Idle time", "ms",
    "Time of the traced step in which a rank ran no operator or kernel and nothing was on its way.",
)  # fmt: skip
STEP_PARTS = Quantity(
    "step_parts", "Parts of a step", "ms",
    "The traced step of the rank that attention kept busiest, every instant counted once.",
)  # fmt: skip
IDEAL_ATTENTION = Quantity(
    "ideal_attention", "Ideal attention", "ms",
    "What local's attention would take on the cores or GPUs of the cell, if they shared its work evenly.",
)  # fmt: skip
STRAGGLER_GAP = Quantity(
    "straggler_gap", "Straggler gap", "ms",
    "How much longer the slowest rank's traced step took than the median rank's.",
)  # fmt: skip
CAUSAL_AREA = Quantity(
    "causal_area", "Causal area", "(query, key, head) triples",
    "How many (query, key, head) triples the causal mask leaves a rank, of one sequence and layer.",
)  # fmt: skip
DOCUMENTS = Quantity(
    "documents", "Packed documents", "documents, pairs and triples per step",
    "What packed documents leave of attention's work, and how evenly ranks share it.",
)  # fmt: skip
TRACED_TO_TIMED = Quantity(
    "traced_to_timed", "Traced step over timed step", "ratio",
    "The slowest rank's traced step over the median timed step; a step off by a fifth is left out.",
)  # fmt: skip
PAYLOAD = Quantity(
    "payload", "Payload bytes", "bytes per step and rank",
    "What a rank hands to collectives in one step for others to have, each byte counted once.",
)  # fmt: skip
ATTENTION_PARITY = Quantity(
    "attention_parity", "Attention parity", "relative error",
    "How far the strategy's attention is from plain float64 attention, relative to the exact maximum.",
)  # fmt: skip
FULL_LENGTH = Quantity(
    "full_length", "Attention at the measured length", "relative error",
    "How far attention is from float64 in one call of the cell's own inspected step.",
)  # fmt: skip
OBJECTIVE = Quantity(
    "objective", "Gradients on the cell's engine", "relative error",
    "How far loss and gradients of one step are from float64, and how far rounding alone is.",
)  # fmt: skip
UPDATES = Quantity(
    "updates", "Updates", "count",
    "Whether the optimizer reached every parameter, as their bits show it.",
)  # fmt: skip
POSITIONS = Quantity(
    "positions", "Rotary positions", "cos, sin",
    "Whether every rank turns queries and keys as one device with the whole sequence would.",
)  # fmt: skip
PROBE = Quantity(
    "probe", "Leak probe", "count, relative error",
    "How many positions of other documents, and of earlier ones, move when one token changes.",
)  # fmt: skip
ERROR_ULPS = Quantity(
    "error_ulps", "Error in ulps", "ulps",
    "The largest deviation from float64 of sampled tokens, in ulps of the dtype at a row's maximum.",
)  # fmt: skip
ATTENTION_ALONE = Quantity(
    "attention_alone", "Attention alone", "ms, FLOP/s, fraction",
    "One attention call, forward and backward, and how near it comes to one device's over the ranks.",
)  # fmt: skip
TRAINING_SIGNAL = Quantity(
    "training_signal", "Loss, gradient norm and tokens", "nats per token, norm, count",
    "The mean loss per valid token of all ranks, the gradient's norm, and proof of the tokens they saw.",
)  # fmt: skip
CHECKS = Quantity(
    "checks", "Checks made and steps compared", "count",
    "Which comparisons a cell's result had to pass, which were not made, and how many steps they hold.",
)  # fmt: skip
SPEED_UP = Quantity(
    "speed_up", "Speed-up", "ratio",
    "Tokens per second over those of the fastest local cell that did the same work on the same machine.",
)  # fmt: skip
SCALING = Quantity(
    "scaling", "Scaling", "ratio, fraction",
    "Tokens per second over those of the fewest ranks that did the same work, also per rank.",
)  # fmt: skip
PREDICTION = Quantity(
    "prediction", "Prediction and its band", "ms, tokens/s, bytes",
    "What the cost model expects of a cell's step, and the ends that a real run should lie between.",
)  # fmt: skip
PREDICTION_ERROR = Quantity(
    "prediction_error", "Predicted next to measured", "fraction",
    "How far what was predicted is from what was measured, as a part of what was measured.",
)  # fmt: skip
REPLAY = Quantity(
    "replay", "Replayed step and its link", "ms, tokens/s",
    "The step of one rank that ran without the others, and the time that its messages need on the link.",
)  # fmt: skip
TELEMETRY = Quantity(
    "telemetry", "Telemetry", "W, MHz, fraction, count",
    "What devices and machine did while the clock ran: power, clocks, throttling, load, lost cores.",
)  # fmt: skip
ENERGY = Quantity(
    "energy", "Tokens per joule", "tokens/J",
    "Tokens of the timed steps over the energy of all their GPUs, by NVML's samples of power.",
)  # fmt: skip
GPU_HOURS = Quantity(
    "gpu_hours", "GPU-hours per billion tokens", "GPU-hours",
    "The GPUs of a cell times the hours in which they train on a billion tokens at its tokens per second.",
)  # fmt: skip
OVER_DATA_PARALLEL = Quantity(
    "data_parallel", "Over data parallelism", "ratio",
    "Tokens per second over those of as many ranks that share no sequence, with as many tokens in a step.",
)  # fmt: skip
CELL_TIME = Quantity(
    "cell_time", "Time of a cell and its fixed cost", "s",
    "What a cell took from start to end, and what of it was not its own steps, checks and traces.",
)  # fmt: skip
STABILITY = Quantity(
    "stability", "Flags on a cell", "text",
    "What a reader must know before trusting a number: unsteady steps, a busy machine, excluded shares.",
)  # fmt: skip
SWEEP_RATIO = Quantity(
    "sweep_ratio", "Ratio of two sides", "ratio",
    "One side's speed over another's, by the processes of both, with a 95 % interval.",
)  # fmt: skip

WITHOUT_METRIC = (
    OUT_OF_MEMORY, CAUSAL_AREA, DOCUMENTS, PAYLOAD, ATTENTION_PARITY, FULL_LENGTH,
    OBJECTIVE, UPDATES, POSITIONS, PROBE,
    TELEMETRY, SWEEP_RATIO,
)  # fmt: skip
"""Those of which only the record says something, or another command."""
