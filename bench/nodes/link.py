"""The connection between a launcher and an agent: who may connect, and messages one at a time."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from bench.config import ConfigError
from bench.nodes.messages import MAX_BYTES, Message, MessageError, decoded, encoded

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


class Link:
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
