"""Time of a step by parts, on the rank with the largest workload.

On a GPU, device and host work at the same time, so a step takes as long as the slower of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from bench.config import DTYPE_BYTES, Cell
from bench.cost.traffic import messages
from bench.extras.predict.operations import Operation, micro_step_operations, update_operations
from bench.extras.predict.speeds import LAUNCHES_PER_BLOCK, LAUNCHES_PER_COMMUNICATION, Speeds
from bench.strategies import STRATEGIES
from bench.strategies.schedule import WIDE_NUMBER_BYTES, Stage
from bench.training.messages import Messages

StageCounts = Mapping[Stage, int]
"""Number of times that each distinct stage runs; most stages of a long ring are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Workload of one optimizer step, on the rank with the largest workload."""

    forward: StageCounts
    """Stages of the forward of one attention call."""
    backward: StageCounts
    """Stages of the backward of one attention call."""
    micro_step: tuple[Operation, ...]
    """Operations of one micro-step outside attention."""
    update: tuple[Operation, ...]
    """Operations of the optimizer's update."""
    messages: tuple[Messages, ...]
    """Communication of the step outside attention."""


@lru_cache(maxsize=16)
def step_work(cell: Cell) -> StepWork | None:
    """Return the workload of one optimizer step of a cell that trains; None if the strategy has no schedule.

    The result is cached, because several predictions of a cell need it.
    """
    facts = STRATEGIES.get(cell.strategy)
    schedule = None if facts is None else facts.schedule(cell)
    if schedule is None:
        return None
    return StepWork(
        forward=Counter(schedule.forward),
        backward=Counter(schedule.backward),
        micro_step=tuple(micro_step_operations(cell)),
        update=tuple(update_operations(cell)),
        messages=messages(cell),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedParts:
    """Milliseconds of the parts of one step."""

    attention_ms: float
    """Attention kernels, and merging of their results."""
    packing_ms: float
    """Copies before and after attention communication."""
    transfer_ms: float
    """Attention communication that no kernel hides."""
    model_state_ms: float
    """Communication of parameters and gradients that no compute hides."""
    optimizer_ms: float
    """The optimizer's update."""
    other_compute_ms: float
    """Compute of micro-steps outside attention."""
    idle_ms: float
    """Time in which the device waits for the host."""
    hidden_transfer_ms: float
    """Attention communication that kernels hide, which is not a part of `step_ms`."""

    @property
    def step_ms(self) -> float:
        """Sum of all parts except `hidden_transfer_ms`."""
        return (
            self.attention_ms
            + self.packing_ms
            + self.transfer_ms
            + self.model_state_ms
            + self.optimizer_ms
            + self.other_compute_ms
            + self.idle_ms
        )


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of attention in forward or in backward."""

    kernels_s: float = 0.0
    """Kernels, and merging of their results."""
    packing_s: float = 0.0
    """Copies before and after communication."""
    exposed_s: float = 0.0
    """Communication that no kernel hides."""
    hidden_s: float = 0.0
    """Communication that kernels hide."""
    launches: float = 0
    """Number of operator launches."""

    def __add__(self, other: AttentionTime) -> AttentionTime:
        return AttentionTime(
            self.kernels_s + other.kernels_s,
            self.packing_s + other.packing_s,
            self.exposed_s + other.exposed_s,
            self.hidden_s + other.hidden_s,
            self.launches + other.launches,
        )

    def multiply(self, count: float) -> AttentionTime:
        """Return the time of `count` calls."""
        return AttentionTime(
            count * self.kernels_s,
            count * self.packing_s,
            count * self.exposed_s,
            count * self.hidden_s,
            count * self.launches,
        )


def step_parts(cell: Cell, work: StepWork, speeds: Speeds) -> PredictedParts:
    """Return the parts of one optimizer step of a cell that trains."""
    calls = cell.model.num_layers * cell.grad_accum
    forward = attention_time(cell, work.forward, speeds, backward=False)
    backward = attention_time(cell, work.backward, speeds, backward=True)
    forwards = STRATEGIES[cell.strategy].forwards_per_step(cell)
    attention = forward.multiply(forwards) + backward.multiply(calls)
    other_s = cell.grad_accum * operations_s(work.micro_step, speeds)
    update_s = operations_s(work.update, speeds)
    state_s = sum(message.count * speeds.communication_s(message.communication) for message in work.messages)
    compute_s = other_s + attention.kernels_s
    free_link_s = compute_s - attention.hidden_s  # compute time in which the link carries no attention
    exposed_state_s = state_s - min(state_s, free_link_s)
    device_s = compute_s + attention.packing_s + attention.exposed_s + exposed_state_s
    micro_step_launches = sum(operation.count * operation.launches for operation in work.micro_step)
    launches = cell.grad_accum * micro_step_launches + round(attention.launches)
    return PredictedParts(
        attention_ms=1e3 * attention.kernels_s,
        packing_ms=1e3 * attention.packing_s,
        transfer_ms=1e3 * attention.exposed_s,
        model_state_ms=1e3 * exposed_state_s,
        optimizer_ms=1e3 * update_s,
        other_compute_ms=1e3 * other_s,
        idle_ms=1e3 * max(0.0, speeds.host_s(cell, launches) - device_s),
        hidden_transfer_ms=1e3 * attention.hidden_s,
    )


def attention_time(cell: Cell, stages: StageCounts, speeds: Speeds, *, backward: bool) -> AttentionTime:
    """Return the time of the forward or backward of one attention call; its stages run one after another."""
    total = AttentionTime()
    for stage, count in stages.items():
        total += _stage_time(cell, stage, speeds, backward=backward).multiply(count)
    return total


def _stage_time(cell: Cell, stage: Stage, speeds: Speeds, *, backward: bool) -> AttentionTime:
    """Return the time of one stage.

    Communication that runs during the stage's blocks is exposed only as far as it takes longer than they do.
    """
    dtype_bytes, head_dim = DTYPE_BYTES[cell.dtype], cell.model.head_dim
    merged_rows = stage.merged_bytes // (max(WIDE_NUMBER_BYTES, dtype_bytes) * head_dim)
    packed_rows = stage.packed_bytes // (dtype_bytes * head_dim)
    merge_kind = "accumulate" if backward else "merge"
    merging = Operation(merge_kind, merged_rows, head_dim, number_bytes=dtype_bytes)
    packing = Operation("pack", packed_rows, head_dim, number_bytes=dtype_bytes)
    kernels_s = speeds.operation_s(merging) + sum(
        speeds.block_s(block, head_dim, cell.kernel, number_bytes=dtype_bytes, backward=backward)
        for block in stage.blocks
    )
    communication_s = sum(map(speeds.communication_s, stage.communications))
    hidden_s = min(communication_s, kernels_s) if stage.is_hidden else 0.0
    launches = LAUNCHES_PER_BLOCK * len(stage.blocks) + LAUNCHES_PER_COMMUNICATION * len(stage.communications)
    return AttentionTime(
        kernels_s=kernels_s,
        packing_s=speeds.operation_s(packing),
        exposed_s=communication_s - hidden_s,
        hidden_s=hidden_s,
        launches=launches,
    )


def operations_s(operations: Iterable[Operation], speeds: Speeds) -> float:
    """Return the seconds of operations that run one after another."""
    return sum(operation.count * speeds.operation_s(operation) for operation in operations)
