"""What tells a hanging rank from a working one, by processes that do what ranks do."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from bench.cell.hang import HangWatch, blamed
from bench.node.activity import Activity
from bench.node.job import NodeJob
from bench.node.local import LocalRanks
from bench.node.rank_files import log_path
from bench.node.stacks import STACK_SIGNAL, Doing, doing
from bench.ranks.place import place_path
from tests.cells import make_cell

WINDOW_S = 0.5
WITH_STACK = f"""
import faulthandler, subprocess, sys, time
log = open(sys.argv[1], "w")
faulthandler.register({STACK_SIGNAL:d}, file=log)
print("ready", flush=True)
"""
SPIN = "while True: pass"
SLEEP = "time.sleep(60)"
OF_A_CHILD = "subprocess.run([sys.executable, '-c', {code!r}])"


class Session:
    """A process that runs some code as a rank does: a session of its own, with a log and a place."""

    def __init__(self, code, log):
        words = [sys.executable, "-c", WITH_STACK + code, log]
        self._process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
        self._process.stdout.readline()
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)

    def start(self):
        """It runs already."""

    def kill(self):
        subprocess.run(["pkill", "-KILL", "-s", str(self.pid)], check=False)

    def join(self):
        with self._process:
            os.close(self.sentinel)


@pytest.fixture
def started(tmp_path_factory):
    """Starts sessions as the ranks of a cell, and ends them."""
    nodes, logs = [], tmp_path_factory.mktemp("sessions")

    def start(*codes, waiting_spins=False):
        cell = make_cell()
        cell = replace(
            cell,
            measure=replace(cell.measure, silence_s=WINDOW_S),
            cluster=replace(cell.cluster, device="cuda" if waiting_spins else "cpu"),
        )
        scratch = tempfile.TemporaryDirectory()
        ranks = LocalRanks(NodeJob(cell, 0, tuple(range(len(codes)))), logs, scratch, Pipe()[0])
        for rank, code in enumerate(codes):
            place_path(Path(scratch.name), rank).write_text("timing")
            ranks.add(rank, Session(code, log_path(logs, rank)))
        nodes.append(ranks)
        return cell, ranks

    yield start
    for each in nodes:
        each.stop()


def look(cell, ranks):
    """What a watch finds that looks for two windows and a half."""
    watch, until_s = HangWatch(cell), time.monotonic() + 2.5 * WINDOW_S
    while time.monotonic() < until_s:
        time.sleep(WINDOW_S / 6)
        seen = ranks.look()
        found = None if seen is None else watch.found([ranks], [seen])
        if found is not None:
            return found
    return None


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("codes", "waiting_spins", "rank"),
    [
        ((SLEEP, SLEEP), False, 0),
        ((SPIN, SLEEP), False, None),
        ((SPIN, SLEEP), True, 1),
        ((OF_A_CHILD.format(code=SPIN), SLEEP), False, None),
        ((OF_A_CHILD.format(code="import time; " + SLEEP), SLEEP), False, None),
    ],
    ids=[
        "all sleep",
        "one computes",
        "one waits for the other's GPU",
        "one compiles",
        "one waits for a lock",
    ],
)
def test_only_ranks_that_neither_work_nor_wait_for_others_work_hang(started, codes, waiting_spins, rank):
    found = look(*started(*codes, waiting_spins=waiting_spins))
    assert (found and found.rank) == rank
    assert found is None or "has done nothing for 0 s, in <module> (<string>:" in found.what


@pytest.mark.ranks
def test_a_stopped_rank_hangs_even_while_another_computes(started):
    cell, ranks = started(SPIN, SPIN)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    found = look(cell, ranks)
    assert found.rank == 1
    assert "stopped by a signal" in found.what


@pytest.mark.ranks
def test_a_launcher_that_was_suspended_does_not_count_that_time(started):
    pids, activity = [started(SLEEP)[1].pids[0]], Activity(window_s=30.0)
    for now_s in (0.0, 1.0, 2.0, 3600.0):
        activity.look(now_s, pids)
    assert not activity.is_quiet(pids[0])


def in_collective(name):
    return Doing("own (code.py:1)", name, is_elsewhere=False)


COMPUTING = Doing("matmul (own.py:7)", None, is_elsewhere=False)


@pytest.mark.parametrize(
    ("found", "stopped", "expected"),
    [
        ({0: in_collective("barrier"), 1: COMPUTING}, {1}, "stopped by a signal, such as SIGSTOP"),
        ({0: in_collective("barrier"), 1: COMPUTING}, set(), "in matmul (own.py:7)"),
        ({0: in_collective("barrier")}, set(), "without an answer"),
    ],
)
def test_the_rank_that_is_in_no_collective_is_blamed(found, stopped, expected):
    blame = blamed(found, stopped, [0, 1])
    assert (blame.rank, blame.what) == (1, f"{expected}, while rank 0 waits in barrier")


def test_of_ranks_in_different_collectives_the_odd_one_is_blamed_and_of_equal_ones_none():
    found = {0: in_collective("barrier"), 1: in_collective("all_reduce"), 2: in_collective("barrier")}
    blame = blamed(found, set(), [0, 1, 2])
    assert (blame.rank, blame.what) == (1, "in all_reduce, while ranks 0 and 2 wait in barrier")
    assert blamed({0: found[0], 2: found[2]}, set(), [0, 2]) is None


C10D = "/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
STACK = f"""Thread 0x00007f (most recent call first):
  <no Python frame>

Current thread 0x00007e (most recent call first):
  File "{C10D}", line 2023 in _new_process_group_helper
  File "{C10D}", line 1800 in init_process_group
  File "/x/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 95 in wrapper
  File "/home/me/bench/node/worker.py", line 209 in join
  File "/home/me/bench/node/worker.py", line 90 in run_cell
"""


def test_a_stack_says_which_collective_was_called_and_from_where():
    assert doing(STACK) == Doing("join (worker.py:209)", "init_process_group", is_elsewhere=False)
    assert doing("Fatal Python error: Segmentation fault") is None


def test_a_handle_that_is_waited_for_counts_as_a_collective(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("work = send()\nkv = arriving.wait()\n")
    stack = f'Current thread 0x00007e (most recent call first):\n  File "{own}", line {{}} in ring\n'
    assert [doing(stack.format(line)).collective for line in (1, 2)] == [None, "wait"]
