"""A traced step part by part, from attention at its best to the step as it was.

All parts are of one rank, the one that attention kept busiest, and add up to its traced step. With A(r)
the attention compute of rank r:

ideal_attention   what `local`'s attention would take on the cell's cores or GPUs, sharing its work evenly:
                  A(local) x capacity(local) / capacity(cell)
beyond_ideal      mean A(r) - ideal: the kernel at the block shapes, heads and merges of the strategy
imbalance         A(busiest) - mean A(r)
packing           copies and conversions in attention, by kernels and by a GPU's copy engines
transfer          exposed attention exchange less its waiting
waiting           exposed attention exchange before the last of the ranks that had to meet arrived
model_state       exposed parameters and gradients
other_communication
                  exposed counts, losses, norms, barriers and what has no known purpose
optimizer         clipping and the update
other_compute     compute outside attention and the optimizer
copies            what a GPU copied or filled without a kernel outside attention; 0 on a CPU
idle              no operator and nothing on its way; on a CPU Python between operators, and threads, gloo's
                  too, that are ready and have no core

Without a `local` cell of the same work on the same machine there is no ideal: `attention`, mean A(r), then
stands for both together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import astuple

from bench.measure.trace.section import TraceSection


class StepParts(Struct, frozen=True, kw_only=True):
    """Milliseconds of one rank's traced step, in the order in which a figure stacks them.

    `waiting` is 0 with all of the exchange in `transfer` where waiting is not known.
    """

    attention: float
    imbalance: float
    packing: float
    transfer: float
    waiting: float
    model_state: float
    other_communication: float
    optimizer: float
    other_compute: float
    copies: float
    idle: float

    @property
    def step_ms(self) -> float:
        return float(sum(astuple(self)))


PREFIX = "part_"
IDEAL = "part_ideal_attention_ms"
BEYOND_IDEAL = "part_attention_beyond_ideal_ms"
PART_COLUMNS = tuple(f"{PREFIX}{name}_ms" for name in StepParts.__struct_fields__)
MODEL_STATE = ("parameters", "gradients")
OTHER_PURPOSES = ("data_and_loss", "other")
COPIES = ("optimizer", "other")


def step_parts(trace: TraceSection) -> StepParts | None:
    """The parts of the busiest rank's step; None where the trace has none."""
    compute, exposed, idle_ms = trace.compute_ms, trace.purpose_exposed_ms, trace.idle_ms
    if compute is None or idle_ms is None:
        return None
    attention_ms = compute["attention"]
    rank = max(range(len(attention_ms)), key=attention_ms.__getitem__)
    mean_ms = sum(attention_ms) / len(attention_ms)
    exchange_ms = _of(exposed, ("attention",), rank)
    waiting_ms = _of(trace.purpose_exposed_waiting_ms or {}, ("attention",), rank)
    return StepParts(
        attention=mean_ms,
        imbalance=attention_ms[rank] - mean_ms,
        packing=compute["packing"][rank] + _of(trace.copies_ms, ("packing",), rank),
        transfer=exchange_ms - waiting_ms,
        waiting=waiting_ms,
        model_state=_of(exposed, MODEL_STATE, rank),
        other_communication=_of(exposed, OTHER_PURPOSES, rank),
        optimizer=compute["optimizer"][rank],
        other_compute=compute["other"][rank],
        copies=_of(trace.copies_ms, COPIES, rank),
        idle=idle_ms[rank],
    )


def _of(times_ms: Mapping[str, Sequence[float]], names: Sequence[str], rank: int) -> float:
    return float(sum(times_ms[name][rank] for name in names if name in times_ms))
