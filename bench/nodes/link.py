"""The connection between a launcher and an agent: who may connect, and messages one at a time."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

from bench.config import ConfigError
from bench.nodes.messages import MAX_BYTES, Message, MessageError, decoded, encoded

KEY = "ULYSSES_RING_BENCH_KEY"
"""The variable that holds what launcher and agents know and nobody else."""
NONCE_BYTES = 32
STALLED_S = 5.0
"""How long a message that has begun may take to come, or to be taken."""


class LinkLostError(RuntimeError):
    """The other side is gone, silent, or says what is no message."""


class Link:
    """Messages to and from the other side."""

    def __init__(self, connected: socket.socket, key: bytes, kind: Any, *, is_launcher: bool) -> None:
        """`kind` of messages are read. Raises LinkLostError where the other side does not know the key."""
        self.address: str = connected.getsockname()[0]
        self._kind = kind
        self._sending = threading.Lock()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole_s = struct.pack("ll", int(STALLED_S), 0)
        for each in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, each, whole_s)
        self.connection = Connection(connected.detach())
        try:
            knows = _knows_key(self.connection, key, is_launcher=is_launcher)
        except (OSError, EOFError) as error:
            self.close()
            raise LinkLostError(f"left before it had shown that it knows the key ({error})") from None
        if not knows:
            self.close()
            raise LinkLostError(f"has another {KEY}")

    def send(self, message: Message) -> None:
        """Raises LinkLostError where nobody takes it."""
        try:
            with self._sending:
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


def _knows_key(connection: Connection, key: bytes, *, is_launcher: bool) -> bool:
    """Whether the other side has this key: each signs what both have drawn, with its own role in front.

    Raises OSError or EOFError for a side that says nothing, or anything longer.
    """
    mine, its = (b"launcher", b"agent") if is_launcher else (b"agent", b"launcher")
    drawn = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(drawn)
    met = connection.recv_bytes(NONCE_BYTES)
    connection.send_bytes(hmac.digest(key, mine + drawn + met, "sha256"))
    return hmac.compare_digest(
        connection.recv_bytes(NONCE_BYTES), hmac.digest(key, its + met + drawn, "sha256")
    )


def key_from_environment() -> bytes:
    """The key that launcher and agents share; raises ConfigError where the variable is not set."""
    key = os.environ.get(KEY, "")
    if not key:
        raise ConfigError(f"{KEY}: not set; copy the whole command that the launcher printed")
    return key.encode()
