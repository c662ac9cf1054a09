"""The launcher of a sweep, on this machine or on the nodes whose agents have come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from bench.cell.launcher import Launcher
from bench.config import ConfigError
from bench.nodes.gathering import Gathering
from bench.nodes.interface import address_of_this_machine
from bench.nodes.link import KEY
from bench.nodes.slurm import allocated_nodes, own_address, slurm_agents
from bench.request import values
from bench.request.choices import Raw
from bench.request.placement import GATHERED
from bench.sweep.plan import Plan

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where agents are to come, and how many."""

    cluster: str
    nodes: int
    address: str
    port: int
    wait_s: float


@contextmanager
def launcher_of(plan: Plan, raw: Raw, say: Say) -> Iterator[Launcher]:
    """The launcher of a planned sweep. Raises ConfigError where its nodes do not come."""
    cluster = raw["cluster"]["name"]
    runs = any(each.cell.mode == "measure" for each in plan.cells)
    if cluster not in GATHERED or not runs:
        yield Launcher()
        return
    meeting = _meeting(raw["cluster"], max(each.cell.cluster.nodes for each in plan.cells))
    key = os.environ.get(KEY, "").encode()
    with (
        Gathering(meeting.address, meeting.port, key or None, plan.lease) as gathering,
        STARTS[cluster](gathering, meeting, say),
    ):
        try:
            yield Launcher(gathering.nodes)
        finally:
            gathering.leave()


def _meeting(raw: Raw, nodes: int) -> Meeting:
    port = values.whole("cluster.port", raw["port"], least=0)
    if port >= 1 << 16:
        raise ConfigError(f"cluster.port={port}: the largest port is 65535; write cluster.port=0 for any")
    address = values.text("cluster.address", raw["address"])
    if address == "auto":
        address = address_of_this_machine(KNOWN_ADDRESS[raw["name"]](os.environ))
    return Meeting(
        cluster=raw["name"],
        nodes=nodes,
        address=address,
        port=port,
        wait_s=values.positive("cluster.wait_s", raw["wait_s"], example="600"),
    )


def _by_hand(gathering: Gathering, meeting: Meeting, say: Say) -> AbstractContextManager[object]:
    say(f"start on each of {meeting.nodes} nodes: {gathering.command}")
    gathering.wait_for(meeting.nodes, meeting.wait_s, say, lambda: None)
    return nullcontext()


@contextmanager
def _by_slurm(gathering: Gathering, meeting: Meeting, say: Say) -> Iterator[None]:
    names = allocated_nodes(os.environ)
    if meeting.nodes > len(names):
        raise ConfigError(
            f"cluster.nodes={meeting.nodes}: the allocation has {len(names)}; write cluster.nodes=auto, or"
            f" allocate {meeting.nodes}"
        )
    with slurm_agents(names[: meeting.nodes], gathering.arguments, gathering.environment) as refuse_ended:
        try:
            gathering.wait_for(meeting.nodes, meeting.wait_s, say, refuse_ended)
            yield
        finally:
            gathering.leave()


STARTS: Mapping[str, Callable[[Gathering, Meeting, Say], AbstractContextManager[object]]] = {
    "nodes": _by_hand,
    "slurm": _by_slurm,
}
"""What starts the agents of a cluster, and waits for them; they leave when it is closed."""
KNOWN_ADDRESS: Mapping[str, Callable[[Mapping[str, str]], str | None]] = {
    "nodes": lambda _: None,
    "slurm": own_address,
}
"""By which others are known to reach this machine; None where its own name has to tell."""
