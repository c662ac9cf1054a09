"""Agents as threads of this process, over the loopback: cells on two nodes, and lost nodes."""

import os
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from bench.common.environment import describe_environment
from bench.extras.nodes.agent import Agent, create_store
from bench.extras.nodes.gathering import Gathering
from bench.extras.nodes.link import Hello, LinkLostError, MessageLink, ToAgent
from bench.run.cell.launcher import Launcher
from bench.run.node.local import LocalNode
from tests.support.cells import counted_and_expected_bytes, make_cell, run_cell, tiny_cell

NODES = ("cluster=nodes", "cluster.nodes=2", "cluster.world_size=4", "engine=ddp")


class Host(threading.Thread):
    """Agent that uses the fork server of this process, as all tests do."""

    def __init__(self, name, gathering):
        super().__init__(daemon=True)
        connection = socket.create_connection((gathering.address, gathering.port))
        self.name, self.connection = name, connection.dup()
        self._arguments = connection, gathering.environment["ULYSSES_RING_BENCH_KEY"].encode(), ToAgent

    def run(self):
        link, node = MessageLink(*self._arguments, is_launcher=False), LocalNode()
        node.interface, store = "lo", create_store("127.0.0.1")
        link.send(
            Hello(
                host=self.name,
                address="127.0.0.1",
                store_port=store.port,
                environment=describe_environment({}),
            )
        )
        self.agent = Agent(link, node)
        with suppress(LinkLostError):
            self.agent.serve()

    def wait_for_pid(self, rank):
        """Return the PID of a rank, once it runs."""
        while self.agent.ranks is None or rank not in self.agent.ranks.pids:
            time.sleep(0.05)
        return self.agent.ranks.pids[rank]


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
    assert two.losses.loss == one.losses.loss
    assert two.engagement == one.engagement
    counted, computed = counted_and_expected_bytes(two)
    assert counted == computed
    assert [node["host"] for node in two.environment.nodes] == ["node2", "node10"]
    assert sorted(path.name for path in folder.iterdir()) == [f"rank_{rank}.log" for rank in range(4)]


def long_cell(*words):
    """Return a cell that runs long enough for a test to interfere with it."""
    return make_cell(
        *NODES, "seq_len=4k", "measure.steps=500", "measure.budget_s=600", "measure.trace=false", *words
    )


def call_in_thread(function):
    """Call a function while the test runs a cell."""
    threading.Thread(target=function, daemon=True).start()


@pytest.mark.usefixtures("launcher", "short_grace")
def test_killed_rank_and_lost_node_are_named_in_the_record(tmp_path):
    with two_nodes() as (launcher, hosts):
        call_in_thread(lambda: os.kill(hosts["node10"].wait_for_pid(3), signal.SIGKILL))
        record, _ = run_cell(launcher, long_cell(), tmp_path / "killed")
        assert (record.status, record.failure.rank, record.failure.node) == ("killed", 3, "node10")
        assert record.reason.startswith("rank 3 on node10, ")

        def cut_off():
            hosts["node2"].wait_for_pid(0)
            hosts["node2"].connection.shutdown(socket.SHUT_RDWR)

        call_in_thread(cut_off)
        started_s = time.monotonic()
        record, _ = run_cell(launcher, long_cell(), tmp_path / "lost")
        assert (record.status, record.failure.kind, record.failure.node) == ("killed", "NODE_LOST", "node2")
        assert "its node is lost: connection" in record.reason
        assert time.monotonic() - started_s < 10

        record, _ = run_cell(launcher, tiny_cell(*NODES), tmp_path / "needs both")
        assert record.status == "killed"
        assert "1 of 2 nodes are left, the cell needs 2" in record.reason
        record, _ = run_cell(launcher, tiny_cell("cluster=nodes", "strategy=local"), tmp_path / "needs one")
        assert record.status == "ok", record.reason
        assert [node["host"] for node in record.environment.nodes] == ["node10"]
