"""Splits a traced step into parts that add up to it.

All parts belong to the rank with the most attention compute. With A(r) the attention compute of rank r:

ideal_attention   time of `local`'s attention, divided evenly over the cell's cores or GPUs:
                  A(local) x capacity(local) / capacity(cell), where capacity counts cores or GPUs
beyond_ideal      mean A(r) - ideal: the cost of the strategy's block shapes, heads and merges
imbalance         A(busiest) - mean A(r)
packing           copies and conversions in attention, by kernels and by a GPU's copy engines
transfer          exposed attention communication less its waiting
waiting           exposed attention communication before the last rank of the collective arrived
model_state       exposed communication of parameters and gradients
other_communication
                  exposed communication of counts, losses and norms, barriers, and unknown purposes
optimizer         clipping and the update
other_compute     compute outside attention and the optimizer
copies            copies and fills of a GPU without a kernel, outside attention; 0 on a CPU
idle              no operator runs and nothing is in flight; on a CPU this is Python between operators, and
                  threads (also of gloo) that are ready and have no core

Without a `local` cell of the same workload on the same machine the ideal is unknown; `attention`, mean A(r),
is then the sum of ideal_attention and beyond_ideal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import astuple

from bench.measure.trace.section import TraceSection


class StepParts(Struct, frozen=True, kw_only=True):
    """Milliseconds of the parts of one rank's traced step, in the order in which a figure stacks them.

    Where waiting is unknown, `waiting` is 0 and `transfer` is all exposed attention communication.
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


IDEAL = "part_ideal_attention_ms"
BEYOND_IDEAL = "part_attention_beyond_ideal_ms"
PART_COLUMNS = tuple(f"part_{name}_ms" for name in StepParts.__struct_fields__)
MODEL_STATE_PURPOSES = ("parameters", "gradients")
OTHER_PURPOSES = ("data_and_loss", "other")
OTHER_COPIES = ("optimizer", "other")
"""Kinds of device copies that are not packing."""


def step_parts(trace: TraceSection) -> StepParts | None:
    """Return the parts of the step of the rank with the most attention compute; None without a breakdown."""
    compute, exposed, idle_ms = trace.compute_ms, trace.purpose_exposed_ms, trace.idle_ms
    if compute is None or idle_ms is None:
        return None
    attention_ms = compute["attention"]
    rank = max(range(len(attention_ms)), key=attention_ms.__getitem__)
    mean_ms = sum(attention_ms) / len(attention_ms)
    attention_communication_ms = _sum_ms(exposed, ("attention",), rank)
    waiting_ms = _sum_ms(trace.purpose_exposed_waiting_ms or {}, ("attention",), rank)
    return StepParts(
        attention=mean_ms,
        imbalance=attention_ms[rank] - mean_ms,
        packing=compute["packing"][rank] + _sum_ms(trace.copies_ms, ("packing",), rank),
        transfer=attention_communication_ms - waiting_ms,
        waiting=waiting_ms,
        model_state=_sum_ms(exposed, MODEL_STATE_PURPOSES, rank),
        other_communication=_sum_ms(exposed, OTHER_PURPOSES, rank),
        optimizer=compute["optimizer"][rank],
        other_compute=compute["other"][rank],
        copies=_sum_ms(trace.copies_ms, OTHER_COPIES, rank),
        idle=idle_ms[rank],
    )


def _sum_ms(times_ms: Mapping[str, Sequence[float]], names: Sequence[str], rank: int) -> float:
    """Return the sum of a rank's times over some names; a name without times counts as 0."""
    return float(sum(times_ms[name][rank] for name in names if name in times_ms))
