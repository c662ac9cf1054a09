"""A line of records.jsonl as its numbers are read: names, types and signs, checked where it comes in.

Only what is read here is described; a record may say more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import astuple

from bench.cost.band import Fit
from bench.record.record import Provenance, Status

Name = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Times = Annotated[list[Positive], Meta(min_length=1)]
Bytes = Annotated[list[Amount | None], Meta(min_length=1)] | None
PerRank = Annotated[list[float], Meta(min_length=1)]
ByPurpose = dict[str, PerRank] | None
StatusName = Annotated[str, Meta(pattern=f"^({'|'.join(Status)})$")]
FitName = Annotated[str, Meta(pattern=f"^({'|'.join(Fit)})$")]
ProvenanceName = Annotated[str, Meta(pattern=f"^({'|'.join(Provenance)})$")]


class Config(Struct):
    """What is computed with of a configuration, which says much more."""

    seq_len: Count
    strategy: Name
    batch: Count = 1
    grad_accum: Count = 1
    sp_degree: Count = 1
    dp_replicate: Count = 1
    dp_shard: Count = 1
    world_size: Count = field(default=1, name="cluster.world_size")


class Environment(Struct):
    """What is computed with of an environment, which says much more."""

    device_name: str | None = None
    gpu_memory_bytes: list[Whole] | None = None
    cores: Count | None = None
    packages: dict[str, str | None] | None = None
    git_commit: str | None = None
    sources: str | None = None


class Band(Struct):
    """What is predicted of a figure, and the ends that a real run should lie between."""

    low: Positive
    expected: Positive
    high: Positive

    def __post_init__(self) -> None:
        if not self.low <= self.expected <= self.high:
            raise ValueError("Expected a band whose expected value lies between its ends")


class Prediction(Struct):
    """What the cost model said of the cell; it says more than is computed with."""

    step_time_ms: Band
    peak_allocated_bytes: Band
    needed_bytes: Band
    fit: FitName | None = None
    """None where it is not known what a rank may take."""


class LinkTime(Struct):
    """Milliseconds on the link, at the rates of the hardware's file."""

    low: Amount
    expected: Amount
    high: Amount


class Analytic(Struct):
    tokens_per_step: Count | None = None
    model_flops_causal: Amount | None = None
    model_flops_full: Amount | None = None
    hardware_flops_causal: Amount | None = None
    hardware_flops_full: Amount | None = None
    attention_forward_flops: Amount | None = None
    attention_backward_flops: Amount | None = None
    needed_bytes: Whole | None = None
    link_ms: dict[str, LinkTime] | None = None
    """Of a replayed step by purpose; None of other records, and where the link's rates are not known."""
    prediction: Prediction | None = None
    """None of a cell that ran."""


class Timing(Struct):
    step_times_ms: Annotated[list[Times], Meta(min_length=1)]
    window_ms: Times
    tokens_per_step: Count
    warmup: Name

    def __post_init__(self) -> None:
        _equally_many(self.step_times_ms, "step_times_ms for each rank")


class Compute(Struct):
    """`compute_ms` by part and rank."""

    attention: PerRank
    packing: PerRank
    optimizer: PerRank
    other: PerRank


class TracedStep(Struct):
    """One of several traced steps, by rank."""

    step_ms: Times
    purpose_exposed_ms: dict[str, PerRank]
    purpose_exposed_waiting_ms: ByPurpose
    other_calls: list[str | None] = []

    def __post_init__(self) -> None:
        waiting_ms = self.purpose_exposed_waiting_ms or {}
        _of_equally_many_ranks(self.step_ms, *self.purpose_exposed_ms.values(), *waiting_ms.values())


class Trace(Struct):
    """Of the traced step of median length, but for `steps`, which a prediction lacks."""

    step_ms: list[Positive]
    total_ms: list[Amount]
    exposed_ms: list[Amount]
    purpose_total_ms: ByPurpose = None
    purpose_exposed_ms: ByPurpose = None
    purpose_exposed_waiting_ms: ByPurpose = None
    compute_ms: Compute | None = None
    copies_ms: dict[str, PerRank] = {}
    idle_ms: PerRank | None = None
    unjoined: list[str | None] = []
    steps: list[TracedStep] = []
    failure: str | None = None
    """Why there are no traced steps; null where there are."""

    def __post_init__(self) -> None:
        if self.failure is None and not (self.step_ms and self.total_ms and self.exposed_ms):
            raise ValueError("a trace without a failure needs times of every rank")
        known = [self.step_ms, self.total_ms, self.exposed_ms, self.idle_ms, self.unjoined]
        for by_name in (
            self.purpose_total_ms,
            self.purpose_exposed_ms,
            self.purpose_exposed_waiting_ms,
            self.copies_ms,
        ):
            known.extend((by_name or {}).values())
        if self.compute_ms is not None:
            known.extend(astuple(self.compute_ms))
        _of_equally_many_ranks(*(per_rank for per_rank in known if per_rank))


class Memory(Struct):
    peak_allocated_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    peak_resident_bytes: Bytes = None
    base_resident_bytes: Bytes = None
    whole_life_allocated_bytes: Bytes = None
    device_used_bytes: Bytes = None
    forward_taken_bytes: Bytes = None
    backward_taken_bytes: Bytes = None
    offloaded_activation_bytes: Bytes = None
    offloaded_optimizer_bytes: Bytes = None


class Losses(Struct):
    loss: Annotated[list[float | None], Meta(min_length=1)] | None = None
    """Null where it was no finite number: of a wrong result."""
    held_against: str | None = None


class Ulps(Struct):
    """Largest errors; a replay has none."""

    out: float | None = None
    dq: float | None = None


class AttentionCalls(Struct):
    forward_ms: Annotated[list[Times], Meta(min_length=1)]
    backward_ms: Annotated[list[Times], Meta(min_length=1)]
    single_forward_ms: Times | None
    single_backward_ms: Times | None
    error_ulps: Ulps
    control_error_ulps: Ulps | None

    def __post_init__(self) -> None:
        _equally_many([*self.forward_ms, *self.backward_ms], "forward_ms and backward_ms for each rank")
        single = (self.single_forward_ms, self.single_backward_ms)
        _equally_many([times for times in single if times], "single_forward_ms and single_backward_ms")


class Telemetry(Struct):
    load_average: float | None = None
    throttled: bool | None = None
    clock_events: list[list[str]] | None = None


class Parity(Struct):
    reason: str | None = None


class Check(Struct):
    what: Name
    against: str
    tokens: Whole | None = None
    rows: Whole | None = None
    steps: Whole | None = None
    of_steps: Whole | None = None
    holds_steps: bool = False
    reason: str | None = None
    below_noise: str | None = None


class Recorded(Struct):
    """One record; a section is null or lacking when its pass did not run."""

    cell_id: Name
    repeat: Whole
    status: StatusName
    reason: str | None
    provenance: ProvenanceName
    config: dict[str, Any]
    experiment: str | None = None
    role: str | None = None
    order: int | None = None
    started_at: str | None = None
    wall_s: Amount | None = None
    fixed_cost_s: float | None = None
    environment: dict[str, Any] | None = None
    analytic: Analytic | None = None
    parity: Parity | None = None
    timing: Timing | None = None
    losses: Losses | None = None
    attention: AttentionCalls | None = None
    memory: Memory | None = None
    trace: Trace | None = None
    """None also where it failed: `untraced` then says why."""
    untraced: str | None = None
    telemetry: Telemetry | None = None
    checks: list[Check] | None = None
    """Null where the cell did not run to its end."""

    def __post_init__(self) -> None:
        if self.trace is not None and self.trace.failure is not None:
            self.untraced = self.trace.failure
            self.trace = None
        _check(self.config, Config, "config")
        if self.environment is not None:
            _check(self.environment, Environment, "environment")


def as_recorded(record: Mapping[str, Any]) -> Recorded:
    """A line of records.jsonl that was parsed; raises ValueError where its numbers cannot be used."""
    return convert(record, Recorded)


def flaw(error: Exception) -> str:
    """What was expected where, of what `as_recorded` raises."""
    return str(error).removesuffix(" - at `$`").replace(" - at `$.", " at `")


def _check(section: Mapping[str, Any], kind: type[Struct], name: str) -> None:
    try:
        convert(section, kind)
    except ValidationError as error:
        raise ValueError(str(error).replace("`$", f"`$.{name}")) from None


def _of_equally_many_ranks(*per_rank: Sequence[Any]) -> None:
    if len({*map(len, per_rank)}) > 1:
        raise ValueError("Expected values of equally many ranks")


def _equally_many(per_rank: Sequence[Sequence[float]], name: str) -> None:
    if len({*map(len, per_rank)}) > 1:
        raise ValueError(f"Expected equally many {name}")
