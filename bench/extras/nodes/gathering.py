"""The nodes of a sweep: waits for their agents, and tells them when it is over."""

from __future__ import annotations

import re
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from msgspec import to_builtins

from bench.common.command import tool_words
from bench.common.environment import describe
from bench.config import ConfigError, WhenTaken
from bench.extras.nodes.interface import family_of
from bench.extras.nodes.link import KEY, Hello, Leave, LinkLostError, MessageLink, ToLauncher
from bench.extras.nodes.remote import RemoteNode

CHECK_S = 1.0
"""How often to look whether an agent will not come."""
SAME_ON_ALL = ("python", "packages", "git_commit", "sources")
"""Of an environment what all nodes must have in common with the launcher."""


class Gathering(AbstractContextManager["Gathering"]):
    """Listens for agents, and has the nodes of those that came."""

    def __init__(
        self, address: str, port: int, key: bytes | None = None, lease: WhenTaken = WhenTaken.WAIT
    ) -> None:
        """At this numeric address and nowhere else; port 0 for any that is free.

        `lease` is what agents do where another sweep measures on their machine.

        Raises ConfigError where it cannot listen there.
        """
        self._key = key or secrets.token_hex(16).encode()
        try:
            self._listener = socket.create_server((address, port), family=family_of(address))
        except OSError as error:
            raise ConfigError(
                f"cluster.address={address} cluster.port={port}: cannot be listened at"
                f" ({error.strerror or error}); name an address of this machine and a free port, or port 0"
            ) from None
        self._listener.settimeout(CHECK_S)
        self.address = address
        self._lease = lease
        self.port: int = self._listener.getsockname()[1]
        self.nodes: list[RemoteNode] = []

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._listener.close()

    def leave(self) -> None:
        """Tell the agents that the sweep is over."""
        for node in self.nodes:
            node.tell(Leave())

    @property
    def environment(self) -> Mapping[str, str]:
        """What an agent needs in its environment."""
        return {KEY: self._key.decode()}

    @property
    def arguments(self) -> list[str]:
        """Of an agent: where it comes to, and what it does where another sweep measures."""
        lease = [] if self._lease is WhenTaken.WAIT else [f"--lease={self._lease}"]
        return [f"{self.address}:{self.port}", *lease]

    @property
    def command(self) -> str:
        """What a person types on each node."""
        return f"{KEY}={self._key.decode()} {tool_words('bench.extras.nodes')} {shlex.join(self.arguments)}"

    def wait_for(
        self, count: int, within_s: float, say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Until the agents of so many nodes are there. Raises ConfigError where they do not come in time.

        `check` is called now and then; it may raise for an agent that will not come.
        """
        until_s = time.monotonic() + within_s
        while len(self.nodes) < count:
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"cluster.nodes={count}: {len(self.nodes)} came within {within_s:g} s;"
                    f" start on each of the others: {self.command}"
                )
            check()
            self._admit(say)
        self.nodes.sort(key=_order)

    def _admit(self, say: Callable[[str], None]) -> None:
        """Accept the nodes that connect within a moment and know the key."""
        try:
            connected, (host, *_) = self._listener.accept()
        except TimeoutError:
            return
        try:
            link = MessageLink(connected, self._key, ToLauncher, is_launcher=True)
            hello: Hello = link.receive()
        except LinkLostError as error:
            say(f"{host}: {error}; not taken in")
            return
        _refuse_other_software(hello)
        self.nodes.append(RemoteNode(link, hello))
        say(f"node {hello.host} ({hello.address}): {len(self.nodes)} here")


def _refuse_other_software(hello: Hello) -> None:
    """Raises ConfigError for a node whose results could not stand beside the others'."""
    own = to_builtins(describe({}))
    for name in SAME_ON_ALL:
        if hello.environment.get(name) != own.get(name):
            differs = _difference(hello.environment.get(name), own.get(name))
            raise ConfigError(
                f"node {hello.host}: {name} differs: {differs}; install the same versions on every node"
            )


def _difference(there: Any, here: Any) -> str:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        name = next(key for key in {**here, **there} if there.get(key) != here.get(key))
        return f"{name} {there.get(name)} there, {here.get(name)} here"
    return f"{there} there, {here} here"


def _order(node: RemoteNode) -> tuple[list[int | str], str]:
    """By name, node2 before node10."""
    name = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", node.hello.host)]
    return name, node.hello.address
