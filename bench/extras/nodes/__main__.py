"""Let this machine run ranks for the launcher at ADDRESS:PORT."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

from msgspec import to_builtins

from bench.common.command import outlive_readers
from bench.common.environment import describe_environment
from bench.common.nvml import visible_uuids
from bench.config import LEASE_POLICIES, ConfigError, ExitCode, LeasePolicy
from bench.extras.nodes.agent import Agent, create_store
from bench.extras.nodes.interface import interface_of
from bench.extras.nodes.link import Hello, LinkLostError, MessageLink, ToAgent, key_from_environment
from bench.extras.nodes.slurm import NODE_NAME
from bench.run.node.lease import lease
from bench.run.node.local import LocalNode

TRIES_S = 60.0
"""Seconds to wait for a launcher that does not listen yet."""
TERM_GRACE_S = 5
"""Seconds from SIGTERM until the agent exits. A scheduler sends it to all processes at once, and the launcher
ends the sweep in this time."""


def main() -> int:
    """Connect to the launcher, run ranks for it until the sweep is over, and return the exit code."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog="bench.extras.nodes", description=__doc__)
    parser.add_argument("launcher", metavar="ADDRESS:PORT", help="address of the launcher, as it printed it")
    parser.add_argument(
        "--lease",
        choices=LEASE_POLICIES,
        default=LeasePolicy.WAIT.value,
        help="if another sweep uses these devices: wait, refuse, or (none) run at the same time",
    )
    arguments = parser.parse_args()
    when_taken, say = LeasePolicy(arguments.lease), partial(print, flush=True)
    try:
        address, key = _address(arguments.launcher), key_from_environment()
        with lease(visible_uuids(), when_taken, say, folder=Path.cwd()):
            return serve(*address, key)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_REQUEST
    except LinkLostError as error:
        print(f"launcher: {error}; this agent ends, and no rank runs here any more", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print("interrupted; no rank runs here any more", file=sys.stderr)
        return ExitCode.INTERRUPTED


def serve(host: str, port: int, key: bytes) -> ExitCode:
    """Run ranks for the launcher at this address until the sweep is over."""
    # A scheduler sends SIGTERM to all processes at once. Ranks inherit this setting; the launcher ends them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    node = LocalNode()
    # All that takes seconds is done before connecting, as the launcher admits one agent at a time.
    node.warm()
    import torch  # noqa: F401  the store needs it

    node.import_all()
    environment = to_builtins(describe_environment({}))
    link = MessageLink(_connect(host, port), key, ToAgent, is_launcher=False)
    node.interface = interface_of(link.address)
    store = create_store(link.address)
    name = os.environ.get(NODE_NAME) or socket.gethostname()
    link.send(Hello(host=name, address=link.address, store_port=store.port, environment=environment))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    Agent(link, node).serve()
    return ExitCode.OK


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{text}: must be ADDRESS:PORT; copy it from the command that the launcher printed")
    return host.strip("[]"), int(port)


def _connect(host: str, port: int) -> socket.socket:
    until_s = time.monotonic() + TRIES_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=TRIES_S)
        except OSError as error:
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"{host}:{port}: no launcher was reached within {TRIES_S:g} s"
                    f" ({error.strerror or error}); check that the sweep waits there and that no firewall"
                    " blocks the port"
                ) from None
            time.sleep(1)
        else:
            return connection


if __name__ == "__main__":
    sys.exit(main())
