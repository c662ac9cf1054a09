"""Messages between a launcher and an agent: lines of JSON that is validated against their types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.config import ConfigError
from bench.run.node.job import NodeJob
from bench.run.node.ranks import NodeEvent, RankEnd
from bench.run.node.stacks import RankActivity


class Start(msgspec.Struct, frozen=True, tag=True):
    """Request to start the ranks of a cell."""

    job: NodeJob


class AskForActivity(msgspec.Struct, frozen=True, tag=True):
    """Request for the stacks of the ranks, which have `wait_s` seconds to write them."""

    wait_s: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Request to end the ranks and to report their ends."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report that the agent has imported what ranks need."""

    store: tuple[str, int]
    """Address and port of a torch store on the agent's machine, through which the ranks can connect."""
    environment: Mapping[str, Any]


class NodeReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Report of the ranks: events since the last report, and answers to requests."""

    events: list[NodeEvent] = []
    progress: int | None = None
    """Number of phases and steps that all ranks of the node have begun; None if there is no new count."""
    activities: Mapping[int, RankActivity] | None = None
    ends: list[RankEnd] | None = None
    files: Mapping[str, bytes] = {}
    """Files that the ranks wrote, by name; sent with their ends."""


Request = Start | AskForActivity | Stop
Report = Ready | NodeReport
BEGINNING = re.compile(rb'\{"type": "(Start|AskForActivity|Stop|Ready|NodeReport)"')
"""Beginning of a message, which a damaged message may have and other text does not."""
END = re.compile(rb'"ends": .*, "files": \{.*\}\}')
"""End of a `NodeReport`, which may have lost its beginning."""


def encode(message: Request | Report) -> bytes:
    """Return a message as a line, written by Python's `json`, as msgspec cannot write nan or infinity."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True)).encode() + b"\n"


def decode(line: bytes, kind: Any) -> Any:
    """Return the message in a line; raise ConfigError if it is none of `kind`, Request or Report."""
    try:
        return msgspec.convert(json.loads(line), kind, str_keys=True)
    except ValueError:
        cause = "a program wrote into it, or a terminal cut or echoed it"
        raise ConfigError(f"passed on a damaged line ({cause}): {str(line[:60])[1:]}") from None
