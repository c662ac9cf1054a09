"""What is stored of one cell, whether it worked or not. Raw samples go in; statistics are `analysis`'s."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 3
READABLE_VERSIONS = frozenset({2, SCHEMA_VERSION})
"""Records of these can be analysed: what a newer version adds is null in an older one."""


class Status(StrEnum):
    OK = "ok"
    UNSUPPORTED = "unsupported"
    WRONG_RESULT = "wrong_result"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    CRASHED = "crashed"
    ERROR = "error"
    INTERRUPTED = "interrupted"


FINDINGS = frozenset({Status.OK, Status.UNSUPPORTED, Status.OUT_OF_MEMORY})
"""Statuses that answer the question: all the others make a sweep's exit code 1."""


class Provenance(StrEnum):
    """What stands behind a record's numbers; `synthetic` ones were made up to try the analysis at scale."""

    MEASURED = "measured"
    REPLAYED = "replayed"
    SIMULATED = "simulated"
    PREDICTED = "predicted"
    PUBLISHED = "published"
    SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Attention and objective against float64 at `tokens` tokens, by tensor.

    Errors of `out`, `lse`, `dq`, `dk` and `dv` are relative to the exact tensor's maximum, those of `loss`
    and `gradients` (of a two-layer cut of the model) to its length. A cell beyond a limit has no timing.
    `checked_in` is the cell that was checked: one of the same sweep may stand for others that differ in
    nothing the check depends on. `reason` says why there are no errors.
    """

    checked_in: str
    tokens: int
    errors: dict[str, float]
    limits: dict[str, float]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """Proof that what was asked for ran.

    `modules` are the Python modules of attention code that were entered in a step on rank 0;
    `attention_shapes[rank]` are the distinct [tokens, query heads, KV heads] that attention was given in a
    full-length step; `sent_bytes[purpose][rank]` is what that step handed to collectives (payload that
    leaves the rank), `calls` how many calls rank 0 made of each purpose and kind.
    """

    attention_name: str
    modules: list[str]
    attention_shapes: list[list[list[int]]]
    sent_bytes: dict[str, list[int]]
    calls: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps back to back after one barrier.

    `step_times_ms[rank][step]`; `window_ms[rank]` is the whole timed window. `warmup` is `full` when
    full-length steps ran before the clock, `short` when the budget left room for shorter ones only.
    """

    step_times_ms: list[list[float]]
    window_ms: list[float]
    warmup: str
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The training signal of every full-length step, equal on all ranks; digests of the first only.

    `tokens_digest[step]` is a sum over (sample, position, token, label), so it does not depend on how a
    step was sharded; `expected_digest` is the same sum taken from the data without any sharding.
    """

    loss: list[float]
    grad_norm: list[float]
    valid_tokens: list[int]
    tokens_digest: list[str]
    expected_digest: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCalls:
    """Attention alone; a step of `timing` is one call, forward and backward.

    `forward_ms[rank][call]` and `backward_ms[rank][call]` are of the timed calls, `single_forward_ms[call]`
    of the same kernel on whole sequences on one device: rank 0 while the others wait. Errors are the
    largest of `error_rows` tokens against float64, in units in the last place of the dtype at each row's
    own maximum; `control_error_ulps` is the single device's.
    """

    forward_ms: list[list[float]]
    backward_ms: list[list[float]]
    single_forward_ms: list[float] | None
    single_backward_ms: list[float] | None
    single_reason: str | None
    error_rows: int
    error_ulps: dict[str, float]
    control_error_ulps: dict[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks per rank, in bytes. `allocated` counts tensors, `reserved` what the allocator holds for them;
    `resident` counts the process's pages, `device_used` the whole device by NVML.

    `peak_` without more is steady state: the timed window on a GPU, one later step on the CPU. `whole_life_`
    is the most of building the model, the first short step, which makes the optimizer's state, and the
    steady state. `_phase` is the part of the step in which the peak was reached: load (building, fetching),
    forward, loss, backward, optimizer. `base_resident_bytes` is what a rank holds before it builds anything,
    `limit_base_bytes` what a memory limit counts from. Null where not measured or not known.
    """

    peak_allocated_bytes: list[int] | None
    peak_reserved_bytes: list[int] | None
    peak_resident_bytes: list[int]
    base_resident_bytes: list[int]
    peak_phase: list[str] | None = None
    whole_life_allocated_bytes: list[int] | None = None
    whole_life_reserved_bytes: list[int] | None = None
    whole_life_phase: list[str] | None = None
    device_used_bytes: list[int] | None = None
    device_used_reason: str | None = None
    limit_base_bytes: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Devices and machine over the timed window, per rank; samples in order, at `sample_ms` of the window.

    `reason` says why figures are null. `clock_events` names every clock-event reason that NVML gave;
    `throttled` is whether any device was held back: by heat, by a power brake, or with its median SM clock
    under 75 % of `reference_clock_mhz`. `foreign_processes` used a rank's device and are no ranks.
    `load_average` is the machine's at the window's start, `involuntary_switches` how often a rank lost its
    core in it.
    """

    reason: str | None
    throttled: bool | None
    sample_ms: list[list[float]] | None
    power_w: list[list[float]] | None
    sm_clock_mhz: list[list[float]] | None
    reference_clock_mhz: list[float] | None
    utilisation: list[list[float]] | None
    clock_events: list[list[str]] | None
    foreign_processes: list[int] | None
    load_average: float
    involuntary_switches: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step under torch.profiler, per rank, in milliseconds. Intervals are merged, never summed.

    `communication_ms[kind][rank]` is the union of that kind's intervals, `total_ms[rank]` the union over
    all kinds, `exposed_ms[rank]` the part of it without compute on that rank, `step_ms[rank]` the traced
    step: the share's denominator. A send or receive in flight behind compute counts in total, not in
    exposed.

    By purpose (attention, parameters, gradients, data_and_loss, other) and rank: `purpose_total_ms` is in
    flight, `purpose_exposed_ms` exposed, `purpose_waiting_ms` the latest arrival of the ranks that had to
    meet minus one's own, `purpose_exposed_waiting_ms` the exposed part of that. The last two are null
    where the ranks' clocks or calls cannot be compared; `unjoined[rank]` says why purposes are unknown.

    `compute_ms[part][rank]`: `attention` is its kernels and arithmetic, `packing` the copies and
    conversions in attention, `optimizer` clipping and the update, `other` the rest. Each instant is booked
    once: `compute_ms`, `purpose_exposed_ms` and `idle_ms` add up to `step_ms`.

    `causal_area[rank]` counts the (query, key, head) triples that the mask leaves a rank, of one sequence
    and layer; null where it is not known how a strategy shares them.
    """

    step_ms: list[float]
    total_ms: list[float]
    exposed_ms: list[float]
    communication_ms: dict[str, list[float]]
    calls: dict[str, list[int]]
    purpose_total_ms: dict[str, list[float]]
    purpose_exposed_ms: dict[str, list[float]]
    purpose_waiting_ms: dict[str, list[float]] | None
    purpose_exposed_waiting_ms: dict[str, list[float]] | None
    compute_ms: dict[str, list[float]]
    idle_ms: list[float]
    causal_area: list[int] | None
    unjoined: list[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """Blocks of one kind: `count` storages of `total_bytes` together, by what they are for.

    `dtype` and `shape` are those of the largest tensor in such a block.
    """

    role: str
    dtype: str
    shape: list[int]
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The failed allocation of one rank.

    `memory` is `device` or `host`, `requested_bytes` null where the error does not say, `limit_bytes` null
    without `cluster.memory_limit_gib`. `held_bytes` is what the rank had then: of a GPU what was allocated,
    on the CPU its data beyond the limit's base, or null. `largest` are the classes with most bytes among
    the live tensors that Python or an autograd graph could reach.
    """

    memory: str
    requested_bytes: int | None
    limit_bytes: int | None
    held_bytes: int | None
    largest: list[BlockClass]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a cell has no result: the first rank to blame, where it was, and the end of its log.

    `step_phase` is the part of the step (load, forward, loss, backward, optimizer), where it was in one.
    `found_after_s` are the seconds from the error, or the rank's death, to the end of all ranks.
    """

    rank: int | None
    phase: str | None
    kind: str
    message: str
    log_tail: str
    step_phase: str | None = None
    found_after_s: float | None = None
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `records.jsonl`. A section is null when its pass did not run."""

    schema_version: int
    cell_id: str
    experiment: str
    role: str
    repeat: int
    order: int
    status: Status
    reason: str | None
    provenance: Provenance
    config: dict[str, Any]
    environment: dict[str, Any]
    analytic: dict[str, Any]
    started_at: str
    wall_s: float
    fixed_cost_s: float | None
    parity: Parity | None = None
    engagement: Engagement | None = None
    timing: Timing | None = None
    losses: Losses | None = None
    attention: AttentionCalls | None = None
    memory: Memory | None = None
    trace: Trace | None = None
    telemetry: Telemetry | None = None
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
