"""Admit the agents of a sweep's nodes, and release them when the sweep is over."""

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

from bench.common.command import tool_command
from bench.common.environment import describe_environment
from bench.config import ConfigError, LeasePolicy
from bench.extras.nodes.interface import family_of
from bench.extras.nodes.link import KEY, Hello, Leave, LinkLostError, MessageLink, ToLauncher
from bench.extras.nodes.remote import RemoteNode

CHECK_S = 1.0
"""Seconds between two checks whether an agent has failed to start."""
SAME_ON_ALL_NODES = ("python", "packages", "git_commit", "sources")
"""Environment entries that must be the same on every node as on the launcher's machine."""


class Gathering(AbstractContextManager["Gathering"]):
    """Listens for agents; `nodes` has a `RemoteNode` for every admitted agent."""

    def __init__(
        self, address: str, port: int, key: bytes | None = None, lease: LeasePolicy = LeasePolicy.WAIT
    ) -> None:
        """Listen for agents.

        Args:
            address: Numeric address to listen at.
            port: Port to listen at, or 0 for any free port.
            key: Secret that agents must know; random by default.
            lease: What an agent does if another sweep uses its machine.

        Raises:
            ConfigError: It is not possible to listen there.
        """
        self._key = key or secrets.token_hex(16).encode()
        try:
            self._listener = socket.create_server((address, port), family=family_of(address))
        except OSError as error:
            raise ConfigError(
                f"cluster.address={address} cluster.port={port}: cannot listen there"
                f" ({error.strerror or error}); name an address of this machine, and a free port or port 0"
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
        """Notify the agents that the sweep is over."""
        for node in self.nodes:
            node.send(Leave())

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that an agent needs."""
        return {KEY: self._key.decode()}

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of an agent: the address of the launcher, and its `--lease`."""
        lease = [] if self._lease is LeasePolicy.WAIT else [f"--lease={self._lease}"]
        return [f"{self.address}:{self.port}", *lease]

    @property
    def command(self) -> str:
        """Command that the user runs on every node."""
        return f"{KEY}={self._key.decode()} {tool_command('bench.extras.nodes')} {shlex.join(self.arguments)}"

    def wait_for(
        self, count: int, within_s: float, say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Wait until the agents of `count` nodes have connected.

        `check` is called about every CHECK_S, and raises ConfigError if an agent has failed to start.

        Raises:
            ConfigError: Not enough agents connected in time, or an agent has other software.
        """
        until_s = time.monotonic() + within_s
        while len(self.nodes) < count:
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"cluster.nodes={count}: only {len(self.nodes)} agents connected within {within_s:g} s;"
                    f" run on every other node: {self.command}"
                )
            check()
            self._admit_agent(say)
        self.nodes.sort(key=_sort_key)

    def _admit_agent(self, say: Callable[[str], None]) -> None:
        """Wait for a connection, at most CHECK_S, and admit the agent if it knows the key."""
        try:
            connection, (host, *_) = self._listener.accept()
        except TimeoutError:
            return
        try:
            link = MessageLink(connection, self._key, ToLauncher, is_launcher=True)
            hello: Hello = link.receive()
        except LinkLostError as error:
            say(f"{host}: {error}; connection refused")
            return
        _refuse_other_software(hello)
        self.nodes.append(RemoteNode(link, hello))
        say(f"node {hello.host} ({hello.address}) connected, {len(self.nodes)} by now")


def _refuse_other_software(hello: Hello) -> None:
    """Raise ConfigError for a node whose software differs from the launcher's."""
    here = to_builtins(describe_environment({}))
    for name in SAME_ON_ALL_NODES:
        if hello.environment.get(name) != here.get(name):
            difference = _describe_difference(hello.environment.get(name), here.get(name))
            raise ConfigError(
                f"node {hello.host}: {name} differs from the launcher's machine: {difference}; install the"
                " same versions on every node"
            )


def _describe_difference(there: Any, here: Any) -> str:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        name = next(key for key in {**here, **there} if there.get(key) != here.get(key))
        return f"{name} {there.get(name)} there, {here.get(name)} here"
    return f"{there} there, {here} here"


def _sort_key(node: RemoteNode) -> tuple[list[int | str], str]:
    """Return a key that sorts nodes by name, with node2 before node10."""
    name = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", node.hello.host)]
    return name, node.hello.address
