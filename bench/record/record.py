"""What is stored of one cell, whether it worked or not. Raw samples go in; statistics are `analysis`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from bench.common.finite import finite

SCHEMA_VERSION = 4


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
    MISTAKE = "mistake"
    """Wrong on purpose: it has to be found."""
    OBSERVED = "observed"
    """Somebody else's training loop: no command of ours runs it again."""


def is_finding(role: str, status: Status) -> bool:
    """Whether a cell ended as one may that answers its question; a mistake has to be found."""
    return status is Status.WRONG_RESULT if role == Role.MISTAKE else status in FINDINGS


class Provenance(StrEnum):
    """What stands behind a record's numbers.

    `synthetic` ones were made up, or made on a test's stand-in for a device: they are evidence for nothing.
    """

    MEASURED = "measured"
    REPLAYED = "replayed"
    PREDICTED = "predicted"
    PUBLISHED = "published"
    SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """Blocks of memory of one kind."""

    role: str
    """What they are for."""
    dtype: str
    """Of the largest tensor in such a block, as is `shape`."""
    shape: list[int]
    count: int
    """How many storages there are."""
    total_bytes: int
    """All of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The failed allocation of one rank."""

    memory: str
    """`device` or `host`."""
    requested_bytes: int | None
    """Null where the error does not say."""
    limit_bytes: int | None
    """Null without `cluster.memory_limit_gib`."""
    held_bytes: int | None
    """What the rank had then: of a GPU what was allocated, on the CPU its data beyond the limit's base, or
    null."""
    largest: list[BlockClass]
    """The classes with most bytes among the live tensors that Python or an autograd graph could reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
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
    found_after_s: float | None = None
    """Seconds from the error, or the rank's death, to the end of all ranks."""
    out_of_memory: OutOfMemory | None = None
    node: str | None = None
    """The host that the rank was on, where ranks ran on other machines than the launcher's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison that a cell's result had to pass, and how far it reaches; or why it was not made."""

    what: str
    """What was compared, by a name that no other check of the cell has."""
    against: str
    """What it was compared with."""
    tokens: int | None = None
    """In a sequence of so many tokens; null where nothing was compared along a sequence."""
    rows: int | None = None
    """For so many sampled tokens of it; null where for all."""
    steps: int | None = None
    """In so many of the cell's full-length steps; null where in none of them, but in a step of its own."""
    of_steps: int | None = None
    """Of so many that ran; null where the check is about a part of them by its nature."""
    holds_steps: bool = False
    """Whether it compares loss and gradients of its steps with those of another computation. A step that no
    such check covers is compared with nothing."""
    reason: str | None = None
    """Why the check was not made, or not in all steps that it is about; null where it was."""
    below_noise: str | None = None
    """Which known mistake rounding would hide from it here, and both sizes; null where it would find all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `records.jsonl`."""

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
    """The command line's names, choices as strings, the rest as `group.key`."""
    environment: dict[str, Any]
    analytic: dict[str, Any]
    """What arithmetic says of one step."""
    started_at: str
    wall_s: float
    fixed_cost_s: float | None
    phases_s: Mapping[str, float] | None = None
    """By the name of a pass, or join and build, the seconds of the rank that spent most on it; null where the
    cell did not run to its end."""
    sections: Mapping[str, Any]
    """By the name of a pass what it found, described in `bench/measure/<name>/section.py`; None where it did
    not run. In the line each stands by itself, beside the other fields."""
    failure: Failure | None = None
    checks: Sequence[Check] | None = None
    """What was compared with what, and what was not; null where the cell did not run to its end."""

    def to_json(self) -> dict[str, Any]:
        """The line's JSON values; a number of a section that is not finite becomes null."""
        fields = asdict(self)
        sections, failure = fields.pop("sections"), fields.pop("failure")
        return {**fields, **finite(sections), "failure": failure}
