"""One record: what is stored of a cell, whether it worked or not.

Ranks fill the sections, a line of `records.jsonl` holds them, and `analysis` reads them with the same types.
Raw samples go in; statistics are `analysis`'s.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, ValidationError, convert, field

from bench.common.environment import Environment
from bench.common.rules import Amount, Count, Name, Whole
from bench.measure import PASSES
from bench.measure.attention.section import AttentionSection
from bench.measure.check import Check
from bench.measure.documents.section import DocumentsSection
from bench.measure.engagement.section import EngagementSection
from bench.measure.full_length.section import FullLengthSection
from bench.measure.losses.section import LossesSection
from bench.measure.memory.section import BlockClass, MemorySection
from bench.measure.objective.section import ObjectiveSection
from bench.measure.parity.section import ParitySection
from bench.measure.positions.section import PositionsSection
from bench.measure.probe.section import ProbeSection
from bench.measure.telemetry.section import TelemetrySection
from bench.measure.timing.section import TimingSection
from bench.measure.trace.section import TraceSection
from bench.measure.updates.section import UpdatesSection
from bench.record.analytic import Analytic

SCHEMA_VERSION = 5
SECTION_NAMES = tuple(name for name, facts in PASSES.items() if facts.part is not None)


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


class Role(StrEnum):
    """What a cell is for."""

    CELL = "cell"
    """An answer to the question."""
    REFERENCE = "reference"
    """What others are compared with."""
    CONTROL = "control"
    """The reference's work done in another way that should make no difference."""
    INJECTED_FAULT = "injected_fault"
    """Wrong on purpose: it has to be found."""
    OBSERVED = "observed"
    """Somebody else's training loop: no command of ours runs it again."""


def is_finding(role: str, status: Status) -> bool:
    """Whether a cell ended as one may that answers its question; a mistake has to be found."""
    return status is Status.WRONG_RESULT if role == Role.INJECTED_FAULT else status in FINDINGS


class Provenance(StrEnum):
    """What stands behind a record's numbers.

    `synthetic` ones were made up, or made on a test's stand-in for a device: they are evidence for nothing.
    """

    MEASURED = "measured"
    REPLAYED = "replayed"
    PREDICTED = "predicted"
    PUBLISHED = "published"
    SYNTHETIC = "synthetic"


class OutOfMemory(Struct, frozen=True, kw_only=True):
    """The failed allocation of one rank."""

    memory: str
    """`device` or `host`."""
    requested_bytes: int | None
    """Null where the error does not say."""
    limit_bytes: int | None
    """Null without `cluster.memory_limit_gib`."""
    allocated_bytes: int | None
    """What the rank had then: of a GPU what was allocated, on the CPU its data beyond the limit's base, or
    null."""
    largest: list[BlockClass]
    """The classes with most bytes among the live tensors that Python or an autograd graph could reach."""


class Failure(Struct, frozen=True, kw_only=True):
    """Why a cell has no result."""

    rank: int | None
    """The rank that caused it, the first of several."""
    phase: str | None
    """The pass that it was in, or join, build or finish."""
    kind: str
    message: str
    log_tail: str
    """The end of its log."""
    step_phase: str | None = None
    """The phase of the step (load, forward, loss, backward, optimizer), where it was in one."""
    detected_after_s: float | None = None
    """Seconds from the error, or the rank's death, to the end of all ranks."""
    out_of_memory: OutOfMemory | None = None
    node: str | None = None
    """The host that the rank was on, where ranks ran on other machines than the launcher's."""


class ComputedSettings(Struct):
    """Settings of a cell that analysis computes with; `Record.config` has all."""

    seq_len: Count
    strategy: Name
    batch: Count = 1
    grad_accum: Count = 1
    sp_degree: Count = 1
    dp_replicate: Count = 1
    dp_shard: Count = 1
    world_size: Count = field(default=1, name="cluster.world_size")


class Record(Struct, frozen=True, kw_only=True):
    """One line of `records.jsonl`. A section is null where its pass did not run.

    Decoding raises msgspec's ValidationError, a ValueError, where a value is not what its field says.
    """

    schema_version: int = SCHEMA_VERSION
    cell_id: Name
    experiment: str
    role: Role
    repeat: Whole
    order: Whole
    """Place of the cell among all cells and repeats of its sweep."""
    status: Status
    reason: str | None
    """Why there is no result, in one line; null where there is one."""
    provenance: Provenance
    config: dict[str, Any]
    """The command line's names, choices as strings, the rest as `group.key`."""
    environment: Environment
    analytic: Analytic
    started_at: str
    """Time in UTC, ISO 8601."""
    wall_s: Amount
    fixed_cost_s: float | None
    """Seconds that were not the cell's own steps and checks; null where there is no result."""
    phases_s: dict[str, float] | None = None
    """Seconds of the slowest rank by pass, and of join and build; null without a result."""
    failure: Failure | None = None
    checks: list[Check] | None = None
    """Comparisons that were made, and those that were not; null where the cell did not run to its end."""
    updates: UpdatesSection | None = None
    probe: ProbeSection | None = None
    objective: ObjectiveSection | None = None
    timing: TimingSection | None = None
    parity: ParitySection | None = None
    losses: LossesSection | None = None
    documents: DocumentsSection | None = None
    attention: AttentionSection | None = None
    memory: MemorySection | None = None
    telemetry: TelemetrySection | None = None
    engagement: EngagementSection | None = None
    positions: PositionsSection | None = None
    trace: TraceSection | None = None
    full_length: FullLengthSection | None = None

    @property
    def sections(self) -> dict[str, Any]:
        """Section of each pass by its name; None where the pass did not run."""
        return {name: getattr(self, name) for name in SECTION_NAMES}

    def __post_init__(self) -> None:
        try:
            convert(self.config, ComputedSettings)
        except ValidationError as error:
            raise ValueError(str(error).replace("`$", "`$.config")) from None
