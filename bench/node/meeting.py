"""A store that the ranks of several nodes meet in: one process a sweep, on one of the nodes."""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from bench.node.lifeline import die_with_launcher

LONG_S = 3600.0


class MeetingPlace:
    """The store's process, as the process that started it sees it."""

    def __init__(self, process: BaseProcess, receiver: Connection) -> None:
        self._process = process
        self._receiver = receiver
        process.start()

    def port(self) -> int:
        """Where ranks reach it; waits until it listens. Raises EOFError where it could not."""
        port: int = self._receiver.recv()
        return port

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def keep_store(address: str, sender: Connection) -> None:
    """Listen at this address and nowhere else; never returns."""
    from torch._C._distributed_c10d import TCPStore

    die_with_launcher()
    listener = socket.create_server((address, 0), family=family_of(address))
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    sender.send(store.port)
    while True:
        time.sleep(LONG_S)


def family_of(address: str) -> socket.AddressFamily:
    """Of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
