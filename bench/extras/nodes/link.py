"""The connection between a launcher and an agent: who may connect, and messages one at a time.

Messages are JSON, read against their types. No pickle: a process that can write to a link must not be able to
run code.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from bench.config import ConfigError
from bench.run.node.job import NodeJob
from bench.run.node.ranks import News, RankEnd
from bench.run.node.stacks import Doing

MAX_BYTES = 64 << 20
"""Most bytes of one message: a report is under 40 kB, a trace that is kept some megabytes."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message."""


class Leave(Message, frozen=True):
    """The sweep is over."""


class Start(Message, frozen=True):
    """Start ranks of a cell."""

    job: NodeJob


class StateRequest(Message, frozen=True):
    """Ask the ranks what they are doing."""

    wait_s: float


class Stop(Message, frozen=True):
    """End the ranks, and say how each ended."""


ToAgent = Leave | Start | StateRequest | Stop


class Hello(Message, frozen=True):
    """An agent is ready: its machine has imported what ranks need."""

    host: str
    address: str
    """Address of the agent's machine on the network of the link."""
    store_port: int
    """Port of a store on the agent's machine, in which ranks of all nodes can meet."""
    environment: Mapping[str, Any]
    """Machine and software of the agent, from `bench.common.environment.describe`."""


class RankEvents(Message, frozen=True):
    """Events of the ranks since the agent's last message."""

    news: Sequence[News]
    progress: int | None
    """Phases and steps that the ranks have begun, all together; None where the agent has not looked again."""


class Answered(Message, frozen=True):
    """What the ranks were doing."""

    doing: Mapping[int, Doing]


class RankFile(Message, frozen=True):
    """A file that a rank left: its log, or a trace."""

    name: str
    content: bytes


class Ended(Message, frozen=True):
    """How each rank ended; the last that is said of a cell's ranks."""

    ends: list[RankEnd]


ToLauncher = Hello | RankEvents | Answered | RankFile | Ended


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


KEY = "ULYSSES_RING_BENCH_KEY"
"""The variable that holds what launcher and agents know and nobody else."""
STALLED_S = 5.0
"""How long a message that has begun may take to come, or to be taken."""
SILENT_S = 5
"""A machine of which nothing was heard for so long is lost: its kernel answers every second."""
LAUNCHER_LOST_S = 20
"""How long the launcher's machine may be silent until agents end their ranks and leave."""


class LinkLostError(RuntimeError):
    """The other side is gone, silent, or says what is no message."""


class MessageLink:
    """Messages to and from the other side."""

    def __init__(self, connected: socket.socket, key: bytes, kind: Any, *, is_launcher: bool) -> None:
        """`kind` of messages are read. Raises LinkLostError where the other side does not know the key."""
        self.address: str = connected.getsockname()[0]
        self._kind = kind
        _set_timeouts(connected, SILENT_S if is_launcher else LAUNCHER_LOST_S)
        self.connection = Connection(connected.detach())
        proofs = [deliver_challenge, answer_challenge]
        try:
            for prove in proofs if is_launcher else reversed(proofs):
                prove(self.connection, key)
        except AuthenticationError:
            self.close()
            raise LinkLostError(f"has another {KEY}") from None
        except (OSError, EOFError, AssertionError) as error:
            self.close()
            raise LinkLostError(f"left before it had shown that it knows the key ({error})") from None

    def send(self, message: Message) -> None:
        """Raises LinkLostError where nobody takes it."""
        try:
            self.connection.send_bytes(encoded(message))
        except OSError as error:
            raise LinkLostError(f"connection lost ({error.strerror or error})") from None

    def receive(self) -> Any:
        """The next message; waits for one. Raises LinkLostError where there will be none."""
        try:
            return decoded(self.connection.recv_bytes(MAX_BYTES), self._kind)
        except MessageError as error:
            raise LinkLostError(f"sent what is no message ({error})") from None
        except EOFError:
            raise LinkLostError("connection closed") from None
        except OSError as error:
            raise LinkLostError(f"connection lost ({error.strerror or error})") from None

    def has_message(self) -> bool:
        """Whether `receive` would find something, also the end."""
        return not self.connection.closed and self.connection.poll()

    def close(self) -> None:
        self.connection.close()


def _set_timeouts(connected: socket.socket, silent_s: int) -> None:
    """Have the kernel end the connection once the other machine has been silent for so long."""
    connected.settimeout(None)
    whole_s = struct.pack("ll", int(STALLED_S), 0)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, whole_s)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, whole_s)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def key_from_environment() -> bytes:
    """The key that launcher and agents share; raises ConfigError where the variable is not set."""
    key = os.environ.get(KEY, "")
    if not key:
        raise ConfigError(f"{KEY}: not set; copy the whole command that the launcher printed")
    return key.encode()
