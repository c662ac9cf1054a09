"""Agents, as threads of this process on its loopback: cells over two nodes, and what becomes of lost ones."""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from bench.cell.launcher import Launcher
from bench.environment import describe, this_machine
from bench.node.local import LocalNode
from bench.nodes.agent import Agent
from bench.nodes.gathering import Gathering
from bench.nodes.link import Link, LinkLostError
from bench.nodes.messages import Hello, ToAgent
from tests.cells import counted_and_computed, run_cell, tiny_cell

NODES = ("cluster=nodes", "cluster.nodes=2", "cluster.world_size=4", "engine=ddp")


class Host(threading.Thread):
    """An agent that has the fork server of this process in common with all tests."""

    def __init__(self, name, gathering):
        super().__init__(daemon=True)
        connected = socket.create_connection((gathering.address, gathering.port))
        self.name, self.connected = name, connected.dup()
        self._arguments = connected, gathering.environment["ULYSSES_RING_BENCH_KEY"].encode(), ToAgent

    def run(self):
        link, node = Link(*self._arguments, is_launcher=False), LocalNode()
        node.interface = "lo"
        link.send(
            Hello(
                host=self.name,
                address="127.0.0.1",
                slurm_node=None,
                machine=this_machine(),
                environment=describe({}),
            )
        )
        with suppress(LinkLostError):
            Agent(link, node).serve()


@contextmanager
def two_nodes():
    with Gathering("127.0.0.1", 0) as gathering:
        hosts = [Host(name, gathering) for name in ("node10", "node2")]
        for host in hosts:
            host.start()
        gathering.wait_for(2, 30, print, lambda: None)
        yield Launcher(nodes=gathering.nodes), {host.name: host for host in hosts}
    for host in hosts:
        host.join(timeout=10)
        assert not host.is_alive()


@pytest.mark.usefixtures("launcher")
def test_a_cell_on_two_nodes_gives_the_losses_and_bytes_of_one(launcher, tmp_path):
    with two_nodes() as (on_nodes, _):
        one, _ = run_cell(launcher, tiny_cell(*NODES, "cluster=cpu", "cluster.nodes=1"), tmp_path / "one")
        two, folder = run_cell(on_nodes, tiny_cell(*NODES), tmp_path / "two")
    assert (one.status, two.status) == ("ok", "ok"), two.reason
    assert two.sections["losses"].loss == one.sections["losses"].loss
    assert two.sections["engagement"] == one.sections["engagement"]
    counted, computed = counted_and_computed(two)
    assert counted == computed
    assert [node["host"] for node in two.environment["nodes"]] == ["node2", "node10"]
    assert sorted(path.name for path in folder.iterdir()) == [f"rank_{rank}.log" for rank in range(4)]
