"""What tells a hanging rank from a working one, by processes that do what ranks do."""

import subprocess
import sys
import time

import pytest

from bench.cell.hang import HangWatch, LiveRank, blamed
from bench.node.activity import Activity
from bench.node.stacks import STACK_SIGNAL, Doing, doing

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


@pytest.fixture
def started(tmp_path):
    """Starts sessions that run some code, and ends them."""
    processes = []

    def start(*codes):
        for code in codes:
            log = tmp_path / f"stacks_{len(processes)}"
            words = [sys.executable, "-c", WITH_STACK + code, log]
            processes.append(subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE))
            processes[-1].stdout.readline()
        return [LiveRank(n, p.pid, tmp_path / f"stacks_{n}", answers=True) for n, p in enumerate(processes)]

    yield start
    for process in processes:
        with process:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)


def look(watch, live):
    """What the watch finds while it looks for two windows and a half."""
    until_s = time.monotonic() + 2.5 * WINDOW_S
    while time.monotonic() < until_s:
        time.sleep(WINDOW_S / 6)
        found = watch.found(time.monotonic(), live)
        if found is not None:
            return found
    return None


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
    found = look(HangWatch(WINDOW_S, waiting_spins=waiting_spins), started(*codes))
    assert (found and found.rank) == rank
    assert found is None or "has done nothing for 0 s, in <module> (<string>:" in found.what


def test_a_stopped_rank_hangs_even_while_another_computes(started):
    live = started(SPIN, SPIN)
    subprocess.run(["kill", "-STOP", str(live[1].pid)], check=True)
    found = look(HangWatch(WINDOW_S, waiting_spins=False), live)
    assert found.rank == 1
    assert "stopped by a signal" in found.what


def test_a_launcher_that_was_suspended_does_not_count_that_time(started):
    live, activity = started(SLEEP), Activity(window_s=30.0)
    pids = [each.pid for each in live]
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
