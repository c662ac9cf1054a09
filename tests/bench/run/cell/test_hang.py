"""When a cell hangs, by the progress that ranks report, and which rank is blamed."""

import tempfile
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from bench.ranks.log import JOIN, RankStage, RankStateFile, place_path
from bench.run.cell.hang import FIRST_STEP_S, JOIN_S, NOBODY, HangWatch, find_blame
from bench.run.node import local
from bench.run.node.job import NodeJob
from bench.run.node.local import LocalRanks
from bench.run.node.stacks import Doing, doing
from tests.support.cells import make_cell


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
        self.watch.record_progress({0: progress})
        return self.watch.blame([self._node], live) if self.watch.is_hanging else None


class Silent:
    """A node whose ranks do not answer."""

    def ask(self, _):
        return {}


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
    clock.watch.tell(RankStage("timing", step_s=step_s))
    assert clock.after(0.0) is None
    assert clock.after(limit_s - 0.1) is None
    said = f"no rank has reported progress for {limit_s:.0f} s: {NOBODY}rank 0 is without an answer, rank 1"
    assert clock.after(0.2).what.startswith(said)


@pytest.mark.parametrize(
    ("timeout_s", "stage", "progress", "limit_s"),
    [
        (120.0, RankStage(JOIN), {0: 2, 1: 2}, JOIN_S),
        (2.0, RankStage(JOIN, "first all_reduce"), {0: 2, 1: 2}, JOIN_S),
        (300.0, RankStage(JOIN), {0: 2, 1: 2}, 150.0),
        (120.0, RankStage(JOIN), {0: 2, 1: 0}, FIRST_STEP_S),  # the second node's ranks still import
        (120.0, RankStage("build"), {0: 2, 1: 2}, FIRST_STEP_S),
    ],
)
def test_ranks_that_join_are_waited_for_a_minute_once_every_node_has_some(
    timeout_s, stage, progress, limit_s
):
    clock = Clock(Silent(), timeout_s)
    clock.watch.tell(stage)
    clock.watch.record_progress(progress)
    assert not clock.watch.is_hanging
    assert clock.watch.limit_s == limit_s


def test_any_progress_begins_the_wait_anew_and_a_timeout_of_0_waits_for_ever():
    clock = Clock(Silent())
    assert [clock.after(500.0, progress) for progress in (1, 2, 3)] == [None] * 3
    assert Clock(Silent(), 0.0).after(1e6) is None


def test_progress_is_what_ranks_note_and_looks_are_seldom(tmp_path, monkeypatch):
    scratch = tempfile.TemporaryDirectory()
    ranks = LocalRanks(NodeJob(make_cell(), (0, 1)), tmp_path, scratch, Pipe()[0])
    places = [RankStateFile(place_path(Path(scratch.name), rank)) for rank in ranks.ranks]
    for place in places:
        place.note("timing", None)
    assert (ranks.look(), ranks.look()) == (2, None)
    monkeypatch.setattr(local, "LOOK_S", 0.0)
    for step_phase in ("forward", "backward", "forward"):
        places[0].note("timing", step_phase)
    assert ranks.look() == 5
    ranks.stop()


def waiting(name):
    return Doing("own (code.py:1)", name)


COMPUTING, ELSEWHERE = Doing("matmul (own.py:7)", None), Doing("own (code.py:1)", None)
LAYERS = {rank: Doing(f"layer (model.py:{rank})", None) for rank in range(3)}
IDLE = Doing("layer (model.py:1)", is_idle=True)
BLAMED = {
    "stopped": (
        {0: waiting("barrier"), 1: replace(COMPUTING, is_stopped=True)},
        "stopped by a signal, such as SIGSTOP, while rank 0 waits in barrier",
    ),
    "in no collective": (
        {0: waiting("barrier"), 1: COMPUTING}, "in matmul (own.py:7), while rank 0 waits in barrier",
    ),
    "without an answer": (
        {0: waiting("barrier"), 1: Doing()}, "without an answer, while rank 0 waits in barrier",
    ),
    "in another collective": (
        {0: waiting("barrier"), 1: waiting("all_reduce"), 2: waiting("barrier")},
        "in all_reduce, while ranks 0 and 2 wait in barrier",
    ),
    "in another place": (
        {0: COMPUTING, 1: ELSEWHERE, 2: COMPUTING},
        "in own (code.py:1), while ranks 0 and 2 wait in matmul (own.py:7)",
    ),
    # A GPU's queue of launches is full long before the host comes to wait for anything by name.
    "with an idle GPU": (
        LAYERS | {1: IDLE},
        "in layer (model.py:1) with nothing on its GPU, while the other GPUs are busy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLAMED)
def test_the_rank_that_keeps_the_others_waiting_is_blamed(case):
    doing, what = BLAMED[case]
    blame = find_blame(doing)
    assert (blame.rank, blame.what) == (1, what)


@pytest.mark.parametrize(
    "doing",
    [
        {0: waiting("barrier"), 1: waiting("barrier")},
        {0: waiting("barrier"), 1: waiting("all_reduce")},
        dict.fromkeys(range(3), IDLE),
    ],
)
def test_where_none_differs_from_most_none_is_blamed(doing):
    assert find_blame(doing) is None


def test_a_rank_that_waits_is_not_blamed_for_an_idle_gpu():
    assert find_blame(LAYERS | {1: replace(waiting("wait"), is_idle=True)}).rank != 1


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


FRAME = 'Current thread 0x00007e (most recent call first):\n  File "{}", line 1 in {}\n'


@pytest.mark.parametrize(
    ("line", "on_cpu", "on_cuda"),
    [("work = send()", None, None), ("kv = arriving.wait()", "wait", "wait"),
     ("x = norm.item()", None, "item"), ("x = ends.tolist()", None, "tolist"),
     ("x = losses.cpu()", None, "cpu")],
)  # fmt: skip
def test_what_waits_in_c_code_is_read_from_the_line_that_calls_it(tmp_path, line, on_cpu, on_cuda):
    """Reading a tensor waits for a GPU; on a CPU rank it computes."""
    own = tmp_path / "own.py"
    own.write_text(line)
    stack = FRAME.format(own, "step")
    assert [doing(stack, device).collective for device in ("cpu", "cuda")] == [on_cpu, on_cuda]


def test_a_rank_that_waits_for_its_gpu_waits():
    torch_cuda = "/x/lib/python3.11/site-packages/torch/cuda/__init__.py"
    assert doing(FRAME.format(torch_cuda, "synchronize")).collective == "synchronize"
