"""What a step computes and sends on the rank with most to do, and how long that takes, part by part.

Device and host work side by side on a GPU: a micro-step takes as long as the slower of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from bench.config import DTYPE_BYTES, Cell
from bench.cost.traffic import messages
from bench.extras.predict.operations import Operation, micro_step, step_end
from bench.extras.predict.speeds import LAUNCHES_PER_BLOCK, LAUNCHES_PER_COMMUNICATION, Speeds
from bench.strategies import STRATEGIES
from bench.strategies.schedule import WIDE_BYTES, Stage, Stages
from bench.training.messages import Messages

Counted = Mapping[Stage, int]
"""Different stages, and how often each comes: most of a long ring are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Of the rank with most to do."""

    forward: Counted
    """Of one call of attention."""
    backward: Counted
    micro_step: tuple[Operation, ...]
    """All but attention."""
    update: tuple[Operation, ...]
    messages: tuple[Messages, ...]
    """All of the step but attention's."""


@lru_cache(maxsize=16)
def step_work(cell: Cell) -> StepWork | None:
    """The work of one optimizer step of a cell that trains; None where a strategy has no formula.

    Kept, as a prediction prices it once at every end of what is not known.
    """
    facts = STRATEGIES.get(cell.strategy)
    schedule = None if facts is None else facts.schedule(cell)
    if schedule is None:
        return None
    return StepWork(
        forward=counted(schedule.forward),
        backward=counted(schedule.backward),
        micro_step=tuple(micro_step(cell)),
        update=tuple(step_end(cell)),
        messages=messages(cell),
    )


def counted(stages: Stages) -> Counted:
    """Equal stages together, in the order of the first of each."""
    return Counter(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedParts:
    """Milliseconds of one step; all but the last add up to it."""

    attention_ms: float
    """Kernels, and taking their results into partial ones."""
    packing_ms: float
    """Copies before and after attention's messages."""
    transfer_ms: float
    """Attention's messages that no kernel hides."""
    model_state_ms: float
    """Parameters and gradients under way that no computation hides."""
    optimizer_ms: float
    other_compute_ms: float
    idle_ms: float
    """The device waits for the host."""
    hidden_transfer_ms: float
    """Attention's messages behind kernels: in none of the others."""

    @property
    def step_ms(self) -> float:
        names = [field.name for field in fields(self) if field.name != "hidden_transfer_ms"]
        return float(sum(getattr(self, name) for name in names))


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of one call of attention in one direction."""

    kernels_s: float
    packing_s: float
    exposed_s: float
    hidden_s: float
    launches: int


def step_parts(cell: Cell, work: StepWork, speeds: Speeds) -> PredictedParts:
    """One optimizer step of a cell that trains."""
    calls = cell.model.num_layers * cell.grad_accum
    forward = attention_time(cell, work.forward, speeds, backward=False)
    backward = attention_time(cell, work.backward, speeds, backward=True)
    forwards = STRATEGIES[cell.strategy].forwards_per_step(cell)

    def of_attention(name: str) -> float:
        once: tuple[float, float] = getattr(forward, name), getattr(backward, name)
        return forwards * once[0] + calls * once[1]

    other_s = cell.grad_accum * seconds_of(work.micro_step, speeds)
    update_s = seconds_of(work.update, speeds)
    state_s = sum(each.count * speeds.communication_s(each.exchange) for each in work.messages)
    kernels_s, hidden_s = of_attention("kernels_s"), of_attention("hidden_s")
    link_is_free_s = other_s + kernels_s - hidden_s  # of the time that the device computes
    exposed_state_s = state_s - min(state_s, link_is_free_s)
    device_s = other_s + kernels_s + of_attention("packing_s") + of_attention("exposed_s") + exposed_state_s
    started = sum(each.count * each.launches for each in work.micro_step)
    launches = cell.grad_accum * started + round(of_attention("launches"))
    return PredictedParts(
        attention_ms=1e3 * kernels_s,
        packing_ms=1e3 * of_attention("packing_s"),
        transfer_ms=1e3 * of_attention("exposed_s"),
        model_state_ms=1e3 * exposed_state_s,
        optimizer_ms=1e3 * update_s,
        other_compute_ms=1e3 * other_s,
        idle_ms=1e3 * max(0.0, speeds.host_s(cell, launches) - device_s),
        hidden_transfer_ms=1e3 * hidden_s,
    )


def attention_time(cell: Cell, stages: Counted, speeds: Speeds, *, backward: bool) -> AttentionTime:
    """One direction of one call, stage after stage."""
    times = [(count, _stage_time(cell, stage, speeds, backward=backward)) for stage, count in stages.items()]
    return AttentionTime(
        *(sum(count * getattr(time, field.name) for count, time in times) for field in fields(AttentionTime))
    )


def _stage_time(cell: Cell, stage: Stage, speeds: Speeds, *, backward: bool) -> AttentionTime:
    """Messages that are hidden show as far as they take longer than the blocks beside them."""
    e, head_dim = DTYPE_BYTES[cell.dtype], cell.model.head_dim
    merged_rows = stage.merged_bytes // (max(WIDE_BYTES, e) * head_dim)
    merging = Operation("accumulate" if backward else "merge", merged_rows, head_dim, number_bytes=e)
    packing = Operation("pack", stage.packed_bytes // (e * head_dim), head_dim, number_bytes=e)
    kernels_s = _rows_s(merging, speeds) + sum(
        speeds.block_s(block, head_dim, cell.kernel, number_bytes=e, backward=backward)
        for block in stage.blocks
    )
    sent_s = sum(map(speeds.communication_s, stage.communications))
    hidden_s = min(sent_s, kernels_s) if stage.is_hidden else 0.0
    launches = LAUNCHES_PER_BLOCK * len(stage.blocks) + LAUNCHES_PER_COMMUNICATION * len(stage.communications)
    return AttentionTime(kernels_s, _rows_s(packing, speeds), sent_s - hidden_s, hidden_s, launches)


def _rows_s(operation: Operation, speeds: Speeds) -> float:
    return speeds.operation_s(operation) if operation.rows else 0.0


def seconds_of(operations: Iterable[Operation], speeds: Speeds) -> float:
    """One after the other."""
    return sum(operation.count * speeds.operation_s(operation) for operation in operations)
