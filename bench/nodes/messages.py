"""What a launcher and the agent of a node tell each other: JSON, read against these types.

No pickle: a process that can write to a link must not be able to run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.node.end import RankEnd
from bench.node.job import NodeJob
from bench.node.ranks import News
from bench.node.stacks import Doing

MAX_BYTES = 64 << 20
"""Of one message: a report is under 40 kB, a trace that is kept some megabytes."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message."""


class Leave(Message, frozen=True):
    """The sweep is over."""


class Start(Message, frozen=True):
    """Start ranks of a cell."""

    job: NodeJob


class Ask(Message, frozen=True):
    """Ask the ranks what they are doing."""

    wait_s: float


class Stop(Message, frozen=True):
    """End the ranks, and say how each ended."""


ToAgent = Leave | Start | Ask | Stop


class Hello(Message, frozen=True):
    """An agent is ready: its machine has imported what ranks need."""

    host: str
    address: str
    """Its own, on the network of the link."""
    store_port: int
    """Where it keeps a store that ranks of all nodes can meet in."""
    environment: Mapping[str, Any]
    """As `bench.environment.describe` says it."""


class Told(Message, frozen=True):
    """What has happened to the ranks."""

    news: Sequence[News]
    progress: int | None
    """As a new look found it; None where there was none."""


class Answered(Message, frozen=True):
    """What the ranks were doing."""

    doing: Mapping[int, Doing]


class Kept(Message, frozen=True):
    """A file that a rank left: its log, or a trace."""

    name: str
    content: bytes


class Ended(Message, frozen=True):
    """How each rank ended; the last that is said of a cell's ranks."""

    ends: list[RankEnd]


ToLauncher = Hello | Told | Answered | Kept | Ended


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
