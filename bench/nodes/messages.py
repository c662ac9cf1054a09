"""What a launcher and the agent of a node tell each other: JSON, read against these types.

No pickle: a process that can write to a link must not be able to run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.environment import Machine
from bench.node.end import RankEnd
from bench.node.job import NodeJob
from bench.node.ranks import Answers, Failing, Left, Look
from bench.ranks.log import Stage

MAX_BYTES = 64 << 20
"""Of one message: a report is under 40 kB, a trace that is kept some megabytes."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message."""


class Beat(Message, frozen=True):
    """Its sender is there."""


class Leave(Message, frozen=True):
    """The sweep is over."""


class HostStore(Message, frozen=True):
    """Keep a store that ranks of all nodes can meet in."""


class Start(Message, frozen=True):
    """Start ranks of a cell, after ending those of another."""

    run: int
    """Counts the runs of cells: what is said of another run than the present one is too late."""
    job: NodeJob


class Ask(Message, frozen=True):
    """Ask the ranks what they are doing."""

    wait_s: float


class Stop(Message, frozen=True):
    """End the ranks, and say how each ended."""


ToAgent = Beat | Leave | HostStore | Start | Ask | Stop


class Hello(Message, frozen=True):
    """An agent is ready: its machine has imported what ranks need."""

    host: str
    address: str
    """Its own, on the network of the link."""
    slurm_node: int | None
    """Its place in the allocation; None outside of Slurm."""
    machine: Machine
    environment: Mapping[str, Any]
    """As `bench.environment.describe` says it."""


class StoreAt(Message, frozen=True):
    """The store's port."""

    port: int


class Seen(Message, frozen=True):
    """What a look at the ranks found."""

    run: int
    look: Look


class Began(Message, frozen=True):
    """The cell's first rank has begun something."""

    run: int
    stage: Stage


class Failed(Message, frozen=True):
    """A rank has failed."""

    run: int
    failing: Failing


class Gone(Message, frozen=True):
    """A rank has ended."""

    run: int
    left: Left


class Answered(Message, frozen=True):
    """What the ranks were doing."""

    run: int
    answers: Answers


class Kept(Message, frozen=True):
    """A file that a rank left: its log, or a trace."""

    run: int
    name: str
    content: bytes


class Ended(Message, frozen=True):
    """How each rank ended; comes after its files."""

    run: int
    ends: list[RankEnd]


class CannotStart(Message, frozen=True):
    """The ranks could not be started."""

    run: int
    why: str


ToLauncher = Hello | Beat | StoreAt | Seen | Began | Failed | Gone | Answered | Kept | Ended | CannotStart


class MessageError(ValueError):
    """Bytes that are no message."""


def encoded(message: Message) -> bytes:
    """One message as bytes. Python's own JSON, which can write a number that is not finite."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True), separators=(",", ":")).encode()


def decoded(content: bytes, kind: Any) -> Any:
    """The message in these bytes; raises MessageError where it is none of ToAgent or ToLauncher, as asked."""
    try:
        return msgspec.convert(json.loads(content), kind, str_keys=True)
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error)[:200].split())
        raise MessageError(f"{type(error).__name__}: {said}") from None
