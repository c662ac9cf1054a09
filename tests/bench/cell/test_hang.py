"""When a cell hangs, by the progress that ranks report, and which rank is blamed."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from bench.cell import hang
from bench.cell.hang import FIRST_STEP_S, HangWatch, blamed
from bench.node import local
from bench.node.job import NodeJob
from bench.node.local import LocalRanks
from bench.node.rank_files import log_path
from bench.node.ranks import Answers, Look
from bench.node.stacks import STACK_SIGNAL, Doing, doing
from bench.ranks.log import Stage
from bench.ranks.place import PlaceFile, place_path
from tests.cells import make_cell

WITH_STACK = f"""
import faulthandler, subprocess, sys, time
log = open(sys.argv[1], "w")
faulthandler.register({STACK_SIGNAL:d}, file=log)
print("ready", flush=True)
"""
SPIN = "while True: pass"
SLEEP = "time.sleep(60)"


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

    def start(*codes):
        cell = make_cell()
        scratch = tempfile.TemporaryDirectory()
        ranks = LocalRanks(NodeJob(cell, tuple(range(len(codes)))), logs, scratch, Pipe()[0])
        for rank, code in enumerate(codes):
            PlaceFile(place_path(Path(scratch.name), rank)).note("timing", None)
            ranks.add(rank, Session(code, log_path(logs, rank)))
        nodes.append(ranks)
        return ranks

    yield start
    for each in nodes:
        each.stop()


class Clock:
    """A watch over one node, and the time that it is told."""

    def __init__(self, node, timeout_s=120.0):
        cell = make_cell()
        cell = replace(cell, measure=replace(cell.measure, hang_timeout_s=timeout_s))
        self.now_s = 0.0
        self.watch = HangWatch(cell, lambda: self.now_s)
        self._node = node

    def after(self, seconds, progress=0, live=(0, 1)):
        self.now_s += seconds
        return self.watch.found([self._node], [Look(live, progress)])


class Silent:
    """A node whose ranks do not answer."""

    def ask(self, _):
        return Answers()


@pytest.mark.parametrize(
    ("timeout_s", "step_s", "limit_s"),
    [
        (120.0, None, FIRST_STEP_S),
        (900.0, None, 900.0),
        (120.0, 0.1, 120.0),
        (120.0, 30.0, 300.0),
        (2.0, 0.1, 2.0),
    ],
)
def test_a_cell_hangs_after_its_timeout_ten_steps_or_ten_minutes_before_the_first(timeout_s, step_s, limit_s):
    clock = Clock(Silent(), timeout_s)
    clock.watch.tell(Stage("timing", step_s=step_s))
    assert clock.after(0.0) is None
    assert clock.after(limit_s - 0.1) is None
    assert f"no rank has reported progress for {limit_s:.0f} s" in clock.after(0.2).what


def test_any_progress_begins_the_wait_anew_and_a_timeout_of_0_waits_for_ever():
    clock = Clock(Silent())
    assert [clock.after(500.0, progress) for progress in (1, 2, 3)] == [None] * 3
    assert Clock(Silent(), 0.0).after(1e6) is None


@pytest.mark.ranks
def test_progress_is_what_ranks_note_and_looks_are_seldom(started, monkeypatch):
    ranks = started(SLEEP, SLEEP)
    assert ranks.look().progress == 2
    assert ranks.look() is None
    monkeypatch.setattr(local, "LOOK_S", 0.0)
    place = PlaceFile(place_path(Path(ranks._scratch.name), 0))
    for step_phase in ("forward", "backward", "forward"):
        place.note("timing", step_phase)
    assert ranks.look().progress == 4


@pytest.mark.ranks
@pytest.mark.parametrize("code", [SPIN, SLEEP])
def test_a_stopped_rank_is_blamed_whatever_the_other_does(started, code, monkeypatch):
    monkeypatch.setattr(hang, "FIRST_STEP_S", 1.0)
    ranks = started(code, code)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    clock = Clock(ranks, 1.0)
    clock.after(0.0)
    found = clock.after(2.0)
    assert found.rank == 1
    assert "stopped by a signal" in found.what


@pytest.mark.ranks
def test_of_two_ranks_in_two_places_neither_is_blamed(started, monkeypatch):
    monkeypatch.setattr(hang, "FIRST_STEP_S", 1.0)
    clock = Clock(started(SPIN, "import os; " + SLEEP), 1.0)
    clock.after(0.0)
    assert hang.NOBODY + "rank 0 is in <module> (<string>:" in clock.after(2.0).what


def in_collective(name):
    return Doing("own (code.py:1)", name)


COMPUTING = Doing("matmul (own.py:7)", None)


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
    assert blamed({0: found[0], 1: found[1]}, set(), [0, 1]) is None


def test_where_none_is_in_a_collective_the_rank_in_another_place_than_most_is_blamed():
    found = dict.fromkeys(range(3), COMPUTING) | {1: Doing("own (code.py:1)", None)}
    said = "in own (code.py:1), while ranks 0 and 2 wait in matmul (own.py:7)"
    assert blamed(found, set(), [0, 1, 2]).what == said


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
    assert doing(STACK) == Doing("join (worker.py:209)", "init_process_group")
    assert doing("Fatal Python error: Segmentation fault") is None


def test_a_handle_that_is_waited_for_counts_as_a_collective(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("work = send()\nkv = arriving.wait()\n")
    stack = f'Current thread 0x00007e (most recent call first):\n  File "{own}", line {{}} in ring\n'
    assert [doing(stack.format(line)).collective for line in (1, 2)] == [None, "wait"]


@pytest.mark.parametrize("read", ["norm.item()", "ends.tolist()", "losses.cpu()"])
def test_a_rank_that_reads_its_gpu_waits_too_and_one_on_a_cpu_computes(tmp_path, read):
    own = tmp_path / "own.py"
    own.write_text(f"x = {read}\n")
    stack = f'Current thread 0x00007e (most recent call first):\n  File "{own}", line 1 in step\n'
    assert f".{doing(stack, 'cuda').collective}()" in read
    assert doing(stack, "cpu").collective is None


def test_a_rank_that_waits_for_its_gpu_is_not_the_one_that_keeps_others_waiting():
    stack = """Current thread 0x00007e (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/cuda/__init__.py", line 1126 in synchronize
  File "/home/me/bench/passes/timing/clock.py", line 35 in synchronise
"""
    found = {0: doing(stack), 1: COMPUTING}
    blame = blamed(found, set(), [0, 1])
    assert (blame.rank, blame.what) == (1, "in matmul (own.py:7), while rank 0 waits in synchronize")


def test_the_rank_whose_gpu_is_idle_while_others_spin_is_blamed_wherever_their_code_is():
    """A GPU's queue of launches is full long before the host comes to wait for anything by name."""
    found = {rank: Doing(f"layer (model.py:{rank})", None) for rank in range(3)}
    blame = blamed(found, set(), [0, 1, 2], idle={1})
    said = "in layer (model.py:1) with nothing on its GPU, while the other GPUs are busy"
    assert (blame.rank, blame.what) == (1, said)
    assert blamed(found, set(), [0, 1, 2], idle={0, 1, 2}) is None
    waits = found | {1: in_collective("wait")}
    assert blamed(waits, set(), [0, 1, 2], idle={1}).rank != 1
