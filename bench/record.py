"""What is stored of one cell, whether it worked or not. Raw samples go in; statistics are `analysis`'s."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 3
READABLE_VERSIONS = frozenset({2, 3})
"""Version 3 added to the trace section: all that version 2 holds means the same."""


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
    MEASURED = "measured"
    REPLAYED = "replayed"
    SIMULATED = "simulated"
    PREDICTED = "predicted"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The strategy's attention against plain float64 attention at `tokens` tokens, by tensor.

    Errors are relative to the exact tensor's maximum; a cell beyond a limit has no other section.
    """

    tokens: int
    errors: dict[str, float]
    limits: dict[str, float]


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
    """The training signal of every full-length step, equal on all ranks.

    `tokens_digest[step]` is a sum over (sample, position, token, label), so it does not depend on how a
    step was sharded; `expected_digest` is the same sum taken from the data without any sharding.
    """

    loss: list[float]
    grad_norm: list[float]
    valid_tokens: list[int]
    tokens_digest: list[str]
    expected_digest: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks per rank, in bytes. `allocated` counts tensors; `resident` counts the process's pages.

    `base_resident_bytes` is what a rank holds before it builds anything; null where not measured.
    """

    peak_allocated_bytes: list[int] | None
    peak_reserved_bytes: list[int] | None
    peak_resident_bytes: list[int]
    base_resident_bytes: list[int]


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
    and layer.
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
    causal_area: list[int]
    unjoined: list[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a cell has no result: the first rank to blame, where it was, and the end of its log."""

    rank: int | None
    phase: str | None
    kind: str
    message: str
    log_tail: str


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
    memory: Memory | None = None
    trace: Trace | None = None
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
