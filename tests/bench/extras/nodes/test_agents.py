"""Two nodes that are agents on this machine, started by a shell: their cells, and their loss."""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from bench.config import ConfigError
from bench.extras.nodes.machines import launcher_of
from bench.plan.plan import plan
from bench.run.node.lease import lease
from tests.support.cells import (
    TWO_CORES,
    counted_and_expected_bytes,
    make_cell,
    make_raw,
    run_cell,
    tiny_cell,
)
from tests.support.waiting import wait_until

PLACED = ("cluster=nodes", "cluster.nodes=2", "cluster.world_size=4", "engine=ddp")


LOGIN_SHELL = """sh -c 'printf "Welcome to $0"; exec "$@"' {host}"""
"""Command that prints something without a newline before the agent starts."""


@contextmanager
def two_nodes(*words, start=LOGIN_SHELL, said=print):
    raw = make_raw(*PLACED, "strategy=ring", "cluster.interface=lo", "sweep_dir=out", *words)
    raw = {**raw, "cluster": {**raw["cluster"], "hosts": "node10,node2", "start": start}}
    with launcher_of(plan([raw], TWO_CORES, single=True), raw, said) as launcher:
        yield launcher


def agents():
    """Return the processes of the agents that this process has started."""
    return [child for child in psutil.Process().children() if is_agent(child)]


def is_agent(process):
    """Return whether this is the process of an agent that has not ended."""
    try:
        return "bench.extras.nodes" in process.cmdline()[1:4]
    except psutil.Error:
        return False


def ranks_of(agent):
    """Return the processes of an agent's ranks, once two of them run."""
    return wait_until(lambda: [r for s in agent.children() if len(r := s.children()) == 2], 60)[0]


def in_thread(function):
    threading.Thread(target=function, daemon=True).start()


def long_cell(*words):
    """Return a cell that runs long enough for a test to interfere with it."""
    return make_cell(
        *PLACED, "seq_len=4k", "measure.steps=500", "measure.budget_s=600", "measure.trace=false", *words
    )


@pytest.mark.usefixtures("short_grace")
def test_cells_on_two_nodes_and_the_loss_of_a_rank_and_of_a_node(launcher, tmp_path):
    said = []
    with two_nodes("lease=none", said=said.append) as on_nodes:
        assert "node node2: Welcome to node2" in said
        one, _ = run_cell(launcher, tiny_cell(*PLACED, "cluster=cpu", "cluster.nodes=1"), tmp_path / "one")
        two, folder = run_cell(on_nodes, tiny_cell(*PLACED), tmp_path / "two")
        assert (one.status, two.status) == ("ok", "ok"), two.reason
        assert two.losses.loss == one.losses.loss
        assert two.engagement == one.engagement
        counted, computed = counted_and_expected_bytes(two)
        assert counted == computed
        assert [node["host"] for node in two.environment.nodes] == ["node10", "node2"]
        assert sorted(path.name for path in folder.iterdir()) == [f"rank_{rank}.log" for rank in range(4)]

        first, second = agents()
        in_thread(lambda agent=second: ranks_of(agent)[0].kill())
        killed, _ = run_cell(on_nodes, long_cell(), tmp_path / "killed")
        assert (killed.status, killed.failure.node) == ("killed", "node2")
        assert killed.failure.rank in (2, 3)
        assert killed.reason.startswith(f"rank {killed.failure.rank} on node2, ")

        def suspend():
            ranks_of(first)
            suspended_s.append(time.monotonic())
            first.suspend()

        suspended_s = []
        in_thread(suspend)
        lost, _ = run_cell(on_nodes, long_cell(), tmp_path / "lost")
        assert time.monotonic() - suspended_s[0] < 10
        assert (lost.status, lost.failure.kind, lost.failure.node) == ("killed", "NODE_LOST", "node10")
        assert "its node is lost: silent for 5 s" in lost.reason

        needs_both, _ = run_cell(on_nodes, tiny_cell(*PLACED), tmp_path / "needs both")
        assert "1 of 2 nodes are left, the cell needs 2" in needs_both.reason
        needs_one, _ = run_cell(on_nodes, tiny_cell("strategy=local"), tmp_path / "needs one")
        assert needs_one.status == "ok", needs_one.reason
        assert [node["host"] for node in needs_one.environment.nodes] == ["node2"]
    assert not any(is_agent(process) for process in (first, second))


def test_agent_waiting_for_a_sweep_exits_with_its_launcher():
    """It runs alone, as on another machine, where nothing but the closed link ends it."""
    words = (sys.executable, "-m", "bench.extras.nodes", "wait", ".", "lo", "")
    with lease((), "refuse", print), subprocess.Popen(words, stdin=-1, stdout=-1, stderr=-1) as agent:
        assert b"waiting for this machine, which is in use by" in agent.stderr.readline()
        agent.stdin.close()
        agent.wait(timeout=10)


def test_agent_refuses_a_machine_in_use_in_one_line():
    with lease((), "refuse", print), pytest.raises(ConfigError) as error, two_nodes("lease=refuse"):
        pass
    assert "lease=refuse: this machine is in use by" in str(error.value)


def test_agent_at_a_terminal_refuses_in_one_line():
    start = f"{sys.executable} -c 'import pty, sys; pty.spawn(sys.argv[2:])' {{host}}"
    with (
        pytest.raises(ConfigError, match=r"is a terminal; remove --pty, -t or -tt from cluster\.start$"),
        two_nodes("lease=none", start=start),
    ):
        pass


def test_agent_whose_input_is_closed_refuses_in_one_line():
    start = "sh -c 'exec \"$@\" </dev/null' {host}"
    with (
        pytest.raises(ConfigError, match=r"docker and kubectl need exec -i$"),
        two_nodes("lease=none", start=start),
    ):
        pass
