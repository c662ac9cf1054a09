"""Connection between a launcher and an agent, with authentication by a shared key and typed messages.

Messages are JSON that is validated against their types, and not pickle, so that a process that can write to a
link cannot run code.
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
from bench.run.node.ranks import NodeEvent, RankEnd
from bench.run.node.stacks import RankActivity

MAX_BYTES = 64 << 20
"""Largest message in bytes. A report has less than 40 kB, a kept trace some megabytes."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of all messages."""


class Leave(Message, frozen=True):
    """Message to an agent: the sweep is over."""


class Start(Message, frozen=True):
    """Message to an agent: start the ranks of a cell."""

    job: NodeJob


class ActivityRequest(Message, frozen=True):
    """Message to an agent: ask the ranks for their stacks."""

    wait_s: float


class Stop(Message, frozen=True):
    """Message to an agent: end the ranks and send their ends."""


ToAgent = Leave | Start | ActivityRequest | Stop


class Hello(Message, frozen=True):
    """Message to the launcher: the agent is ready and has imported what ranks need."""

    host: str
    address: str
    """Address of the agent's machine on the network of the link."""
    store_port: int
    """Port of a torch store on the agent's machine, through which the ranks of all nodes can connect."""
    environment: Mapping[str, Any]
    """Machine and software of the agent, from `bench.common.environment.describe_environment`."""


class RankEvents(Message, frozen=True):
    """Message to the launcher: events of the ranks since the last message."""

    events: Sequence[NodeEvent]
    progress: int | None
    """Number of phases and steps that all ranks of the node have begun; None if there is no new count."""


class ActivityReport(Message, frozen=True):
    """Message to the launcher: the activity of each rank."""

    activities: Mapping[int, RankActivity]


class RankFile(Message, frozen=True):
    """Message to the launcher: a file that a rank wrote, its log or a trace."""

    name: str
    content: bytes


class Ended(Message, frozen=True):
    """Message to the launcher: the ends of the ranks, the last message about a cell."""

    ends: list[RankEnd]


ToLauncher = Hello | RankEvents | ActivityReport | RankFile | Ended


class MessageError(ValueError):
    """Error about bytes that are not a valid message."""


def encode(message: Message) -> bytes:
    """Return a message as JSON bytes, written by Python's `json`, as msgspec cannot write nan or infinity."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True), separators=(",", ":")).encode()


def decode(content: bytes, kind: Any) -> Any:
    """Return the message in these bytes. `kind` is the union of valid types, ToAgent or ToLauncher.

    Raises:
        MessageError: The bytes are no message of this kind.
    """
    try:
        return msgspec.convert(json.loads(content), kind, str_keys=True)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error)[:200].split())
        raise MessageError(f"{type(error).__name__}: {reason}") from None


KEY = "ULYSSES_RING_BENCH_KEY"
"""Environment variable with the secret key that only the launcher and its agents know."""
STALLED_S = 5.0
"""Longest time for sending or receiving the rest of a message, in seconds."""
SILENT_S = 5
"""Seconds without an answer to TCP's probes, one per second, until an agent's machine counts as lost."""
LAUNCHER_LOST_S = 20
"""Seconds without an answer from the launcher's machine until agents end their ranks and exit."""


class LinkLostError(RuntimeError):
    """Error about the other side, which has ended, is silent, or has sent an invalid message."""


class MessageLink:
    """Connection that sends messages to the other side and receives messages from it."""

    def __init__(self, connected: socket.socket, key: bytes, kind: Any, *, is_launcher: bool) -> None:
        """Authenticate the other side.

        Args:
            connected: Connected socket.
            key: Secret that both sides must know.
            kind: Union of message types that this side receives.
            is_launcher: Whether this side is the launcher, which challenges first.

        Raises:
            LinkLostError: The other side does not know the key.
        """
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
            raise LinkLostError(f"authentication failed, as it has another {KEY}") from None
        except (OSError, EOFError, AssertionError) as error:
            self.close()
            raise LinkLostError(
                f"disconnected before it had proved that it knows the key ({error})"
            ) from None

    def send(self, message: Message) -> None:
        """Send a message; raise LinkLostError if the other side does not receive it."""
        try:
            self.connection.send_bytes(encode(message))
        except OSError as error:
            raise LinkLostError(f"connection lost ({error.strerror or error})") from None

    def receive(self) -> Any:
        """Wait for the next message and return it; raise LinkLostError if none can arrive."""
        try:
            return decode(self.connection.recv_bytes(MAX_BYTES), self._kind)
        except MessageError as error:
            raise LinkLostError(f"sent an invalid message ({error})") from None
        except EOFError:
            raise LinkLostError("connection closed") from None
        except OSError as error:
            raise LinkLostError(f"connection lost ({error.strerror or error})") from None

    def has_message(self) -> bool:
        """Return whether `receive` would return or raise without waiting."""
        return not self.connection.closed and self.connection.poll()

    def close(self) -> None:
        self.connection.close()


def _set_timeouts(connected: socket.socket, silent_s: int) -> None:
    """Let TCP close the connection once the other machine has been silent for `silent_s` seconds."""
    connected.settimeout(None)
    stalled_s = struct.pack("ll", int(STALLED_S), 0)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stalled_s)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stalled_s)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def key_from_environment() -> bytes:
    """Return the key that launcher and agents share; raise ConfigError if the variable is not set."""
    key = os.environ.get(KEY, "")
    if not key:
        raise ConfigError(f"{KEY}: not set; run the whole command that the launcher printed, which sets it")
    return key.encode()
