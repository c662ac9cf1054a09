"""Quantities that the project measures; each has a section on a page of docs/quantities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantity:
    """Quantity with one or several metrics."""

    page: str
    """Link to the section, relative to docs/quantities: `family#section` for a heading in `family.md`."""
    name: str
    """Heading of the section."""
    unit: str
    meaning: str
    """Definition in one sentence: the first one of the section, and the tooltip of its columns."""


TOKENS_PER_S = Quantity(
    "speed#tokens-per-second", "Tokens per second", "tokens/s",
    "Tokens of all sequences of a step, divided by the slowest rank's median step time.",
)  # fmt: skip
STEP_TIME = Quantity(
    "speed#step-time", "Step time", "ms",
    "Median over the timed steps of the slowest rank's time from batch fetch to zero_grad.",
)  # fmt: skip
SAMPLES = Quantity(
    "speed#samples-and-repeats", "Samples and repeats", "count",
    "Number of samples behind a median: steps of one process, or one median per process.",
)  # fmt: skip
MFU = Quantity(
    "speed#mfu-and-hfu", "MFU and HFU", "fraction 0..1",
    "FLOP/s of a step, divided by the dense 16-bit peak of all its GPUs together.",
)  # fmt: skip
SPEED_UP = Quantity(
    "comparison#speed-up", "Speed-up", "ratio",
    "Tokens per second over those of the fastest local cell with the same workload on the same machine.",
)  # fmt: skip
SCALING = Quantity(
    "comparison#scaling", "Scaling", "ratio, fraction",
    "Tokens per second over those of the cell with the fewest ranks and the same workload.",
)  # fmt: skip
OVER_DATA_PARALLEL = Quantity(
    "comparison#speed-up-over-data-parallelism", "Speed-up over data parallelism", "ratio",
    "Tokens per second over those of equally many ranks without sequence parallelism.",
)  # fmt: skip
SPEED_RATIO = Quantity(
    "comparison#speed-ratio", "Speed ratio", "ratio",
    "Speed of one side over the other, with a 95 % interval from the processes of both sides.",
)  # fmt: skip
PEAK_ALLOCATED = Quantity(
    "memory#peak-allocated-memory", "Peak allocated memory", "bytes",
    "Largest number of bytes in tensors at one moment on the worst rank, in steady state.",
)  # fmt: skip
OTHER_MEMORY = Quantity(
    "memory#reserved-device-used-and-resident-memory", "Reserved, device-used and resident memory", "bytes",
    "Memory of the allocator, the whole device and the process on the worst rank, in tensors or not.",
)  # fmt: skip
SAVED_MEMORY = Quantity(
    "memory#saved-and-offloaded-memory", "Saved and offloaded memory", "bytes",
    "Reduction of the peak by one option, measured and by formula, and bytes that offloading moves.",
)  # fmt: skip
CAPACITY = Quantity(
    "memory#memory-capacity", "Memory capacity", "bytes, fraction",
    "Memory that one rank may use, by its limit or its device, and the share of it that tensors reached.",
)  # fmt: skip
OUT_OF_MEMORY = Quantity(
    "memory#out-of-memory", "Out of memory", "bytes, tokens",
    "The allocation that failed, the largest blocks at that time, and the longest length that fits.",
)  # fmt: skip
ATTENTION_COMMUNICATION_SHARE = Quantity(
    "communication#attention-communication-share", "Attention communication share", "fraction 0..1",
    "Share of the traced steps in which data moved for attention while the rank computed nothing.",
)  # fmt: skip
COMMUNICATION_SHARE = Quantity(
    "communication#communication-share", "Communication share", "fraction 0..1",
    "Share of the traced steps in which data moved for any purpose while the rank computed nothing.",
)  # fmt: skip
WAITING = Quantity(
    "communication#waiting-and-load-imbalance", "Waiting and load imbalance", "ms, fraction 0..1",
    "Time from a rank's arrival at a collective until the last rank arrives.",
)  # fmt: skip
PAYLOAD = Quantity(
    "communication#payload-bytes", "Payload bytes", "bytes per step and rank",
    "Bytes that a rank sends to other ranks in one step, each counted once.",
)  # fmt: skip
STEP_PARTS = Quantity(
    "step_parts#parts-of-a-step", "Parts of a step", "ms",
    "Traced step of the rank with most attention compute, split so that every instant counts once.",
)  # fmt: skip
IDEAL_ATTENTION = Quantity(
    "step_parts#ideal-attention", "Ideal attention", "ms",
    "Attention time of the local cell, divided evenly over the cores or GPUs of this cell.",
)  # fmt: skip
PACKING = Quantity(
    "step_parts#packing", "Packing", "ms",
    "Time of the operators inside attention that only copy, rearrange or convert data.",
)  # fmt: skip
IDLE = Quantity(
    "step_parts#idle-time", "Idle time", "ms",
    "Time of a traced step in which a rank ran no operator or kernel and nothing was in flight.",
)  # fmt: skip
STRAGGLER_GAP = Quantity(
    "step_parts#straggler-gap", "Straggler gap", "ms",
    "Traced step time of the slowest rank less that of the median rank.",
)  # fmt: skip
TRACED_TO_TIMED = Quantity(
    "step_parts#traced-step-over-timed-step", "Traced step over timed step", "ratio",
    "Slowest rank's traced step over the median timed step.",
)  # fmt: skip
ATTENTION_ALONE = Quantity(
    "attention#attention-alone", "Attention alone", "ms, FLOP/s, fraction",
    "Time of one attention call, forward and backward, and its speed relative to one device.",
)  # fmt: skip
ERROR_ULPS = Quantity(
    "attention#error-in-ulps", "Error in ulps", "ulps",
    "Largest deviation of sampled tokens from float64, in ulps of the dtype at the row's maximum.",
)  # fmt: skip
CAUSAL_AREA = Quantity(
    "attention#causal-area", "Causal area", "(query, key, head) triples",
    "Number of (query, key, head) triples that the causal mask leaves a rank, per sequence and layer.",
)  # fmt: skip
DOCUMENTS = Quantity(
    "attention#packed-documents", "Packed documents", "documents, pairs and triples per step",
    "Attention work that packed documents leave, and its imbalance between ranks.",
)  # fmt: skip
CHECKS = Quantity(
    "checks#checks-made-and-steps-compared", "Checks made and steps compared", "count",
    "Checks that a cell passed, checks that were not made, and the number of steps that were compared.",
)  # fmt: skip
ATTENTION_PARITY = Quantity(
    "checks#attention-parity", "Attention parity", "relative error",
    "Error of the strategy's attention on a short sequence against float64, relative to the exact maximum.",
)  # fmt: skip
FULL_LENGTH = Quantity(
    "checks#attention-at-the-measured-length", "Attention at the measured length", "relative error",
    "Error of one attention call of the inspected step at full length against float64.",
)  # fmt: skip
POSITIONS = Quantity(
    "checks#rotary-positions", "Rotary positions", "cos, sin",
    "Difference between a rank's rotary cos and sin and those of the whole sequence on one device.",
)  # fmt: skip
TRAINING_SIGNAL = Quantity(
    "training#loss-gradient-norm-and-tokens", "Loss, gradient norm and tokens", "nats per token, norm, count",
    "Mean loss per valid token over all ranks, gradient norm, and a digest of the tokens.",
)  # fmt: skip
OBJECTIVE = Quantity(
    "training#gradients-on-the-cells-engine", "Gradients on the cell's engine", "relative error",
    "Error of loss and gradients of one short step against float64, compared with rounding alone.",
)  # fmt: skip
GRADIENTS = Quantity(
    "training#gradients-at-the-measured-length", "Gradients at the measured length", "relative difference",
    "Difference of every parameter's gradient in the first full-length step from that of the reference,"
    " relative to the length of the reference's gradient.",
)  # fmt: skip
POSITION_LOSSES = Quantity(
    "training#loss-by-position", "Loss by position", "nats per token",
    "Mean loss in 16 equal parts of the sequence and at the positions where shards may end.",
)  # fmt: skip
SCORES = Quantity(
    "training#scores-of-answers", "Scores of answers", "fraction 0..1, nats per token",
    "Share of questions whose answer is right token by token, and the log-likelihood of its tokens.",
)  # fmt: skip
UPDATES = Quantity(
    "training#updates", "Updates", "count",
    "Proof by digest that the optimizer changed every parameter and that replicas stay equal.",
)  # fmt: skip
PREDICTION = Quantity(
    "prediction#prediction-and-its-band", "Prediction and its band", "ms, tokens/s, bytes",
    "Step time, speed and memory that the cost model expects, each with a low and a high bound.",
)  # fmt: skip
PREDICTION_ERROR = Quantity(
    "prediction#prediction-error", "Prediction error", "fraction",
    "Difference between prediction and measurement, as a fraction of the measurement.",
)  # fmt: skip
REPLAY = Quantity(
    "prediction#replayed-step-and-its-link", "Replayed step and its link", "ms, tokens/s",
    "Step time of one rank that ran without the others, and the modelled time of its messages on the link.",
)  # fmt: skip
STABILITY = Quantity(
    "stability#flags-on-a-cell", "Flags on a cell", "text",
    "Warnings about a cell: unsteady steps, a busy machine, excluded traces.",
)  # fmt: skip
TELEMETRY = Quantity(
    "stability#telemetry", "Telemetry", "W, MHz, fraction, count",
    "State of GPUs and machine during the timed steps: power, clocks, throttling, load, context switches.",
)  # fmt: skip
ENERGY = Quantity(
    "energy_and_cost#tokens-per-joule", "Tokens per joule", "tokens/J",
    "Tokens of the timed steps divided by the energy of all GPUs, from NVML's power samples.",
)  # fmt: skip
GPU_HOURS = Quantity(
    "energy_and_cost#gpu-hours-per-billion-tokens", "GPU-hours per billion tokens", "GPU-hours",
    "GPU-hours in which the cell trains on a billion tokens at its measured rate.",
)  # fmt: skip
CELL_TIME = Quantity(
    "energy_and_cost#time-of-a-cell", "Time of a cell", "s",
    "Wall time of a cell, and the part of it that is not its own steps, checks and traces.",
)  # fmt: skip

WITHOUT_METRIC = (
    OUT_OF_MEMORY, CAUSAL_AREA, DOCUMENTS, PAYLOAD, ATTENTION_PARITY, FULL_LENGTH,
    OBJECTIVE, GRADIENTS, POSITION_LOSSES, SCORES, UPDATES, POSITIONS,
    TELEMETRY, SPEED_RATIO,
)  # fmt: skip
"""Quantities that appear in the record or in another command, but in no column of the summary."""
