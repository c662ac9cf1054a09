"""Agent of a node, which starts and follows ranks on its machine for a launcher on another machine."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import termios
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
from msgspec import to_builtins

from bench.common.environment import describe_environment
from bench.common.nvml import visible_uuids
from bench.config import ConfigError, LeasePolicy
from bench.extras.nodes.link import Link, beats
from bench.extras.nodes.protocol import AskForActivity, NodeReport, Ready, Request, Start, decode, encode
from bench.run.node.lease import lease
from bench.run.node.local import LocalNode, LocalRanks
from bench.run.node.ranks import NodeEvent, RankEnded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LAUNCHER_LOST_S = 20.0
"""Seconds of silence of the launcher until an agent ends its ranks and exits."""
LOOK_S = 1.0
"""Seconds after which the progress of ranks is counted although no event has come."""
LOG_BYTES, FILE_BYTES = 1 << 20, 32 << 20
"""Bytes of a log's end that are sent to the launcher, and bytes of the largest other file that is sent."""


def run_agent(reads: int, writes: int, policy: str, folder: str, interface: str, peer: str) -> None:
    """Run ranks for the launcher at the other end of two pipes until the link is lost.

    `policy` is a `LeasePolicy`. `folder` is the launcher's, and is entered if it exists here. `interface` and
    `peer` are those of `own_address`, which may raise ConfigError, as `lease` may.
    """
    with suppress(OSError):
        os.chdir(folder)
    # A scheduler sends SIGTERM to agents and ranks as well, but the launcher ends the ranks and the link.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    link, say = Link(reads, writes, LAUNCHER_LOST_S), partial(print, file=sys.stderr, flush=True)
    link.send(b"\n")  # ends a line that a login shell has printed without its end
    if os.isatty(reads) and termios.tcgetattr(reads)[3] & termios.ICANON:
        raise ConfigError("standard input is a terminal; remove --pty, -t or -tt from cluster.start")
    with ExitStack() as stack:
        try:
            with beats([link], then=partial(_interrupt_if_lost, link)):
                stack.enter_context(lease(visible_uuids(), LeasePolicy(policy), say))
                node, store = _prepare(*own_address(interface, peer))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            say("standard input was closed before the agent was ready; docker and kubectl need exec -i")
            return
        stack.enter_context(beats([link]))
        link.send(encode(Ready((store.host, store.port), to_builtins(describe_environment({})))))
        serve(link, node)


def _interrupt_if_lost(link: Link) -> None:
    """Interrupt the main thread if the link is lost. No request arrives before the agent is ready."""
    link.receive()
    if link.lost_reason is not None:
        os.kill(os.getpid(), signal.SIGINT)


def _prepare(address: str, interface: str) -> tuple[LocalNode, TCPStore]:
    """Import what ranks need; return the node and a store at this address alone."""
    node = LocalNode()
    node.interface = interface
    node.warm()
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    )
    port, fd = listener.getsockname()[1], listener.detach()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    node.import_all()
    return node, store


def own_address(interface: str, peer: str) -> tuple[str, str]:
    """Return the address at which other nodes reach this machine, and the network interface that has it.

    For `auto` it is the first one, other than the loopback, of: the address from which the machine `peer` is
    reached, that of the ssh connection, that of the host name. Raises ConfigError if there is none.
    """
    found = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    usable = [address for address, name in found.items() if name == interface]
    if interface == "auto":
        guesses = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as towards_peer:
            towards_peer.connect((peer, 9))  # sends nothing
            guesses.insert(0, towards_peer.getsockname()[0])
        with suppress(OSError):
            guesses += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
        usable = [
            guess for guess in guesses if guess in found and not ipaddress.ip_address(guess).is_loopback
        ]
    if not usable:
        known = ", ".join(sorted({*found.values()}))
        raise ConfigError(f"cluster.interface={interface}: leads to no address here; write one of {known}")
    return usable[0], found[usable[0]]


def serve(link: Link, node: LocalNode) -> None:
    """Execute the requests of a launcher until the link is lost. Ends the ranks and deletes their files."""
    ranks: LocalRanks | None = None
    events: list[NodeEvent] = []
    with ExitStack() as cell:
        while link.lost_reason is None:
            wait([link.reads, *([] if ranks is None else ranks.waitables())], timeout=LOOK_S)
            for request in [decode(line, Request) for line in link.receive()]:
                if isinstance(request, Start):
                    folder = Path(cell.enter_context(TemporaryDirectory(prefix="ulysses-ring-bench-")))
                    ranks = node.start(request.job, folder)
                    cell.callback(ranks.stop)
                elif isinstance(request, AskForActivity) and ranks is not None:
                    link.send(encode(NodeReport(activities=ranks.ask_for_activity(request.wait_s))))
                elif ranks is not None:
                    ranks.stop()
                    link.send(encode(NodeReport(ends=ranks.ends(), files=_files(folder))))
                    cell.close()
                    ranks, events = None, []
            if ranks is not None:
                events += ranks.take_events()
                progress = ranks.count_progress()
                # Two short lines in a row take 40 ms on srun's connection, by Nagle's algorithm.
                is_whole = not ranks.pids or any(not isinstance(event, RankEnded) for event in events)
                if progress is not None or (events and is_whole):
                    link.send(encode(NodeReport(events=events, progress=progress)))
                    events = []


def _files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file that is not too large, by name; of a log only its end."""
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    ends = {name: content[-LOG_BYTES if name.endswith(".log") else 0 :] for name, content in contents.items()}
    return {name: content for name, content in ends.items() if len(content) <= FILE_BYTES}
