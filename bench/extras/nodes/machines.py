"""Create the launcher of a sweep, for this machine or for nodes with agents."""

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
from bench.request.placement import MULTI_NODE_CLUSTERS
from bench.run.cell.launcher import Launcher

Say = Callable[[str], None]
WAIT_S = 600.0
"""Longest time to wait for the agents of all nodes, in seconds."""


@contextmanager
def launcher_of(plan: Plan, raw: Raw, say: Say) -> Iterator[Launcher]:
    """Yield the launcher of a planned sweep. Agents on other nodes start before it and end with the context.

    Raises:
        ConfigError: The agents of the nodes cannot be started or do not connect.
    """
    cluster = raw["cluster"]["name"]
    if cluster not in MULTI_NODE_CLUSTERS or not any(
        planned.cell.mode == "measure" for planned in plan.cells
    ):
        yield Launcher()
        return
    nodes = max(planned.cell.cluster.nodes for planned in plan.cells)
    key = os.environ.get(KEY, "").encode()
    address, port = _address(raw["cluster"]), _port(raw["cluster"])
    with (
        Gathering(address, port, key or None, plan.lease) as gathering,
        AGENT_STARTERS[cluster](gathering, nodes, say),
    ):
        yield Launcher(gathering.nodes)


def _port(raw: Raw) -> int:
    port = values.whole_number("cluster.port", raw["port"], least=0)
    if port >= 1 << 16:
        raise ConfigError(
            f"cluster.port={port}: the largest port is 65535; cluster.port=0 takes any free one"
        )
    return port


def _address(raw: Raw) -> str:
    """Return the address at which other nodes reach this machine; Slurm or the host name give `auto`."""
    address = values.text("cluster.address", raw["address"])
    if address != "auto":
        return address
    return address_of_this_machine(own_address(os.environ) if raw["name"] == "slurm" else None)


def _by_hand(gathering: Gathering, nodes: int, say: Say) -> AbstractContextManager[object]:
    """Let the user start the agents, and wait for them; nothing needs to be ended afterwards."""
    say(f"run on each of {nodes} nodes: {gathering.command}")
    gathering.wait_for(nodes, WAIT_S, say, lambda: None)
    return nullcontext()


@contextmanager
def _by_slurm(gathering: Gathering, nodes: int, say: Say) -> Iterator[None]:
    """Start the agents in job steps of the Slurm allocation, and wait for them; end them at the end."""
    names = allocated_nodes(os.environ)
    if nodes > len(names):
        raise ConfigError(
            f"cluster.nodes={nodes}: the allocation has {len(names)}; set cluster.nodes=auto, or"
            f" allocate {nodes} nodes"
        )
    with slurm_agents(names[:nodes], gathering.arguments, gathering.environment) as refuse_ended:
        try:
            gathering.wait_for(nodes, WAIT_S, say, refuse_ended)
            yield
        finally:
            gathering.leave()


AGENT_STARTERS: Mapping[str, Callable[[Gathering, int, Say], AbstractContextManager[object]]] = {
    "nodes": _by_hand,
    "slurm": _by_slurm,
}
"""Functions that start agents, wait for them, and return a context that ends them, by the cluster's name."""
