"""What a line of records.jsonl must be before its numbers are drawn: names, types and signs, nothing more.

Only what is read here is described; a record may say more, and an older one lacks whole sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, field

from bench.record import Provenance, Status

Name = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Amounts = Annotated[list[Amount], Meta(min_length=1)]
Times = Annotated[list[Positive], Meta(min_length=1)]
Bytes = Annotated[list[Amount | None], Meta(min_length=1)] | None
StatusName = Annotated[str, Meta(pattern=f"^({'|'.join(Status)})$")]
ProvenanceName = Annotated[str, Meta(pattern=f"^({'|'.join(Provenance)})$")]


class Config(Struct):
    seq_len: Count
    strategy: Name
    batch: Count = 1
    grad_accum: Count = 1
    sp_degree: Count = 1
    dp_replicate: Count = 1
    dp_shard: Count = 1
    world_size: Count = field(default=1, name="cluster.world_size")


class Analytic(Struct):
    model_flops_causal: Amount = 0
    model_flops_full: Amount = 0
    hardware_flops_causal: Amount = 0
    hardware_flops_full: Amount = 0


class Timing(Struct):
    step_times_ms: Annotated[list[Times], Meta(min_length=1)]
    window_ms: Times
    tokens_per_step: Count
    warmup: Name

    def __post_init__(self) -> None:
        if len({*map(len, self.step_times_ms)}) > 1:
            raise ValueError("Expected equally many step_times_ms for each rank")


class Trace(Struct):
    step_ms: Times
    total_ms: Amounts
    exposed_ms: Amounts


class Memory(Struct):
    peak_allocated_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    peak_resident_bytes: Bytes = None
    base_resident_bytes: Bytes = None


class Losses(Struct):
    loss: Annotated[list[float], Meta(min_length=1)] | None = None


class Form(Struct):
    """One record; a section is null or lacking when its pass did not run."""

    cell_id: Name
    repeat: Whole
    status: StatusName
    reason: str | None
    provenance: ProvenanceName
    config: Config
    wall_s: Amount = 0
    environment: dict[str, Any] | None = None
    analytic: Analytic | None = None
    timing: Timing | None = None
    trace: Trace | None = None
    memory: Memory | None = None
    losses: Losses | None = None


def flaw(record: Mapping[str, Any]) -> str | None:
    """The first thing wrong with a record: what was expected where; None where its numbers can be used."""
    try:
        convert(record, Form)
    except ValidationError as error:
        return str(error).replace(" - at `$.", " at `")
    return None
