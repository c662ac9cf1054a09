"""Record: the stored result of one run of a cell, successful or not.

Ranks fill the sections, a line of `records.jsonl` stores them, and `analysis` reads them with the same types.
Records contain raw samples; `analysis` computes statistics.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, ValidationError, convert, field

from bench.common.environment import Environment
from bench.common.rules import Name, NonNegativeFloat, NonNegativeInt, PositiveInt
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
from bench.measure.quality.section import QualitySection
from bench.measure.telemetry.section import TelemetrySection
from bench.measure.timing.section import TimingSection
from bench.measure.trace.section import TraceSection
from bench.measure.updates.section import UpdatesSection
from bench.record.analytic import Analytic

SCHEMA_VERSION = 5
SECTION_NAMES = tuple(name for name, facts in PASSES.items() if facts.part_type is not None)


class Status(StrEnum):
    """Outcome of a cell's run."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    WRONG_RESULT = "wrong_result"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    CRASHED = "crashed"
    ERROR = "error"
    INTERRUPTED = "interrupted"


RESULT_STATUSES = frozenset({Status.OK, Status.UNSUPPORTED, Status.OUT_OF_MEMORY})
"""Statuses that are results. Any other status makes the exit code of a sweep 1."""


class Role(StrEnum):
    """Purpose of a cell in its sweep."""

    CELL = "cell"
    """Cell that the user asked for."""
    REFERENCE = "reference"
    """Cell of `local` that other cells are compared with."""
    CONTROL = "control"
    """Computation equivalent to that of the reference, whose distance from it is the noise."""
    INJECTED_FAULT = "injected_fault"
    """Cell that computes wrongly on purpose, so that a check must find it."""
    TRAINING = "training"
    """Cell that trains the model of later cells."""
    OBSERVED = "observed"
    """User's training loop, which no command of this project can run again."""


def is_result(role: str, status: Status) -> bool:
    """Return whether a status is a result. For an injected fault the only result is WRONG_RESULT."""
    return status is Status.WRONG_RESULT if role == Role.INJECTED_FAULT else status in RESULT_STATUSES


class Provenance(StrEnum):
    """Way in which the numbers of a record were obtained.

    `synthetic` numbers are invented, or come from a test's stand-in for a device. They are no evidence.
    """

    MEASURED = "measured"
    REPLAYED = "replayed"
    PREDICTED = "predicted"
    PUBLISHED = "published"
    SYNTHETIC = "synthetic"


class OutOfMemory(Struct, frozen=True, kw_only=True):
    """Failed allocation of a rank."""

    memory: str
    """`device`, `host` or `pinned host`."""
    requested_bytes: int | None
    """Bytes that the failed allocation requested; null if the error does not state them."""
    limit_bytes: int | None
    """Memory limit of the rank; null without `cluster.memory_limit_gib`."""
    allocated_bytes: int | None
    """Bytes that the rank had allocated at that time; null if unknown. On a CPU these are the bytes that
    count towards the limit."""
    largest: list[BlockClass]
    """Classes of live tensors that take most bytes. Only tensors that Python or an autograd graph references
    are known."""


class Failure(Struct, frozen=True, kw_only=True):
    """Cause of a cell without a result."""

    rank: int | None
    """Rank that caused the failure, the first of several; null if no rank is known to be the cause."""
    phase: str | None
    """Pass that the rank was in, or join, build or finish."""
    kind: str
    """Type of the exception, name of the signal that ended the rank, or a status."""
    message: str
    """Text of the exception, after a way out where it misleads."""
    log_tail: str
    """Last lines of the rank's log."""
    step_phase: str | None = None
    """Phase of the step (load, forward, loss, backward, optimizer); null outside of a step."""
    detected_after_s: float | None = None
    """Seconds from the error, or the end of the rank's process, until all ranks had ended."""
    out_of_memory: OutOfMemory | None = None
    node: str | None = None
    """Host of the rank; null if all ranks ran on the launcher's machine."""


class ComputedSettings(Struct):
    """Settings in `Record.config` that analysis computes with, and whose values are therefore checked."""

    seq_len: PositiveInt
    strategy: Name
    batch: PositiveInt = 1
    grad_accum: PositiveInt = 1
    sp_degree: PositiveInt = 1
    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    world_size: PositiveInt = field(default=1, name="cluster.world_size")


class Record(Struct, frozen=True, kw_only=True):
    """Stored result of one run of a cell: a line of `records.jsonl`. A section is null if its pass did not
    run.

    Decoding raises msgspec's ValidationError, a ValueError, for a value that breaks the rule of its field.
    """

    schema_version: int = SCHEMA_VERSION
    cell_id: Name
    experiment: str
    role: Role
    repeat: NonNegativeInt
    order: NonNegativeInt
    """Position of the cell in the order in which its sweep runs cells and repeats."""
    status: Status
    reason: str | None
    """One line that says why there is no result; null if there is one."""
    provenance: Provenance
    config: dict[str, Any]
    """Settings of the cell, as `Cell.flat` returns them."""
    environment: Environment
    analytic: Analytic
    started_at: str
    """Start of the cell in UTC, ISO 8601."""
    wall_s: NonNegativeFloat
    """Seconds from start to end of the cell."""
    fixed_cost_s: float | None
    """Seconds of the cell outside of steps and checks; null without a result."""
    phases_s: dict[str, float] | None = None
    """Seconds of the slowest rank in each phase (a pass, join, build, ...); null without a result."""
    failure: Failure | None = None
    checks: list[Check] | None = None
    """Checks that were made or skipped; null if the cell did not run to its end."""
    updates: UpdatesSection | None = None
    quality: QualitySection | None = None
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
