"""The launcher of a sweep, on this machine or on the nodes whose agents have come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from bench.config import ConfigError
from bench.extras.nodes.gathering import Gathering
from bench.extras.nodes.interface import address_of_this_machine
from bench.extras.nodes.link import KEY
from bench.extras.nodes.slurm import allocated_nodes, own_address, slurm_agents
from bench.plan.plan import Plan
from bench.request import values
from bench.request.choices import Raw
from bench.request.placement import GATHERED
from bench.run.cell.launcher import Launcher

Say = Callable[[str], None]
WAIT_S = 600.0
"""Longest wait for the agents of all nodes."""


@contextmanager
def launcher_of(plan: Plan, raw: Raw, say: Say) -> Iterator[Launcher]:
    """The launcher of a planned sweep. Raises ConfigError where its nodes do not come."""
    cluster = raw["cluster"]["name"]
    if cluster not in GATHERED or not any(each.cell.mode == "measure" for each in plan.cells):
        yield Launcher()
        return
    nodes = max(each.cell.cluster.nodes for each in plan.cells)
    key = os.environ.get(KEY, "").encode()
    address, port = _address(raw["cluster"]), _port(raw["cluster"])
    with (
        Gathering(address, port, key or None, plan.lease) as gathering,
        STARTS[cluster](gathering, nodes, say),
    ):
        yield Launcher(gathering.nodes)


def _port(raw: Raw) -> int:
    port = values.whole("cluster.port", raw["port"], least=0)
    if port >= 1 << 16:
        raise ConfigError(f"cluster.port={port}: the largest port is 65535; write cluster.port=0 for any")
    return port


def _address(raw: Raw) -> str:
    """By which others are to reach this machine: as given, as Slurm knows it, or its own name's."""
    address = values.text("cluster.address", raw["address"])
    if address != "auto":
        return address
    return address_of_this_machine(own_address(os.environ) if raw["name"] == "slurm" else None)


def _by_hand(gathering: Gathering, nodes: int, say: Say) -> AbstractContextManager[object]:
    say(f"start on each of {nodes} nodes: {gathering.command}")
    gathering.wait_for(nodes, WAIT_S, say, lambda: None)
    return nullcontext()


@contextmanager
def _by_slurm(gathering: Gathering, nodes: int, say: Say) -> Iterator[None]:
    names = allocated_nodes(os.environ)
    if nodes > len(names):
        raise ConfigError(
            f"cluster.nodes={nodes}: the allocation has {len(names)}; write cluster.nodes=auto, or"
            f" allocate {nodes}"
        )
    with slurm_agents(names[:nodes], gathering.arguments, gathering.environment) as refuse_ended:
        try:
            gathering.wait_for(nodes, WAIT_S, say, refuse_ended)
            yield
        finally:
            gathering.leave()


STARTS: Mapping[str, Callable[[Gathering, int, Say], AbstractContextManager[object]]] = {
    "nodes": _by_hand,
    "slurm": _by_slurm,
}
"""What starts the agents of a cluster, and waits for them; they leave when it is closed."""
