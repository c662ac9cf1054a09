"""A cell hangs when ranks report no progress, and the report names the rank that keeps the others waiting."""

import tempfile
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.ranks.log import JOIN, RankStage, RankStateFile, rank_state_path
from bench.run.cell.hang import FIRST_STEP_S, JOIN_S, UNCLEAR, HangWatch, find_cause
from bench.run.node import local
from bench.run.node.job import NodeJob
from bench.run.node.local import LocalRanks
from bench.run.node.stacks import RankActivity, read_activity
from tests.support.cells import make_cell


class Clock:
    """A HangWatch over one node, with a clock that the test moves."""

    def __init__(self, node, timeout_s=120.0):
        cell = make_cell()
        cell = replace(cell, measure=replace(cell.measure, hang_timeout_s=timeout_s))
        self.now_s = 0.0
        self.watch = HangWatch(cell, lambda: self.now_s)
        self._node = node

    def after(self, seconds, progress=0, live=(0, 1)):
        self.now_s += seconds
        self.watch.record_progress({0: progress})
        return self.watch.report([self._node], live) if self.watch.is_hanging else None


class Silent:
    """A node whose ranks write no stack."""

    def ask_for_activity(self, _):
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
def test_hang_limit_is_timeout_or_ten_steps_or_ten_minutes(timeout_s, step_s, limit_s):
    clock = Clock(Silent(), timeout_s)
    clock.watch.record_stage(RankStage("timing", step_s=step_s))
    assert clock.after(0.0) is None
    assert clock.after(limit_s - 0.1) is None
    message = clock.after(0.2).message
    assert message.startswith(f"no rank has reported progress for {limit_s:.0f} s: {UNCLEAR}: ")
    assert "rank 0 is unresponsive, rank 1 is unresponsive; " in message
    assert "raise measure.hang_timeout_s" in message


def test_report_at_deadline_names_the_rank_and_the_setting():
    node = SimpleNamespace(ask_for_activity=lambda _: {0: waiting("barrier"), 1: COMPUTING})
    watch = Clock(node).watch
    report = watch.report_at_deadline([node], (0, 1))
    assert report.rank == 1
    assert (
        "did not end within measure.timeout_s=1800: rank 1 is in matmul (own.py:7), while" in report.message
    )
    assert "raise measure.timeout_s" in report.message
    assert watch.report_at_deadline([Silent()], (0, 1)) is None


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
def test_hang_limit_is_a_minute_while_ranks_of_all_nodes_join(timeout_s, stage, progress, limit_s):
    clock = Clock(Silent(), timeout_s)
    clock.watch.record_stage(stage)
    clock.watch.record_progress(progress)
    assert not clock.watch.is_hanging
    assert clock.watch.limit_s == limit_s


def test_hang_watch_restarts_on_progress_and_0_disables_it():
    clock = Clock(Silent())
    assert [clock.after(500.0, progress) for progress in (1, 2, 3)] == [None] * 3
    assert Clock(Silent(), 0.0).after(1e6) is None


def test_count_progress_counts_states_and_is_rate_limited(tmp_path, monkeypatch):
    scratch = tempfile.TemporaryDirectory()
    ranks = LocalRanks(NodeJob(make_cell(), (0, 1)), tmp_path, scratch, Pipe()[0])
    states = [RankStateFile(rank_state_path(Path(scratch.name), rank)) for rank in ranks.ranks]
    for state in states:
        state.write("timing", None)
    assert (ranks.count_progress(), ranks.count_progress()) == (2, None)
    monkeypatch.setattr(local, "LOOK_S", 0.0)
    for step_phase in ("forward", "backward", "forward"):
        states[0].write("timing", step_phase)
    assert ranks.count_progress() == 5
    ranks.stop()


def waiting(name):
    return RankActivity("own (code.py:1)", name)


COMPUTING, ELSEWHERE = RankActivity("matmul (own.py:7)", None), RankActivity("own (code.py:1)", None)
LAYERS = {rank: RankActivity(f"layer (model.py:{rank})", None) for rank in range(3)}
IDLE = RankActivity("layer (model.py:1)", is_idle=True)
CAUSES = {
    "stopped": (
        {0: waiting("barrier"), 1: replace(COMPUTING, is_stopped=True)},
        "rank 1 is stopped by a signal such as SIGSTOP, while rank 0 waits in barrier",
    ),
    "in no collective": (
        {0: waiting("barrier"), 1: COMPUTING},
        "rank 1 is in matmul (own.py:7), while rank 0 waits in barrier",
    ),
    "unresponsive": (
        {0: waiting("barrier"), 1: RankActivity()}, "rank 1 is unresponsive, while rank 0 waits in barrier",
    ),
    "in another collective": (
        {0: waiting("barrier"), 1: waiting("all_reduce"), 2: waiting("barrier")},
        "rank 1 is in all_reduce, while ranks 0 and 2 wait in barrier",
    ),
    "in another place": (
        {0: COMPUTING, 1: ELSEWHERE, 2: COMPUTING},
        "rank 1 is in own (code.py:1), while ranks 0 and 2 are in matmul (own.py:7)",
    ),
    # A GPU's queue of launches is full long before the host calls a function that waits.
    "with an idle GPU": (
        LAYERS | {1: IDLE},
        "rank 1 is in layer (model.py:1) and its GPU is idle, while other GPUs are busy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_find_cause_names_the_rank_that_others_wait_for(case):
    activities, message = CAUSES[case]
    cause = find_cause(activities)
    assert (cause.rank, cause.message) == (1, message)


@pytest.mark.parametrize(
    "activities",
    [
        {0: waiting("barrier"), 1: waiting("barrier")},
        {0: waiting("barrier"), 1: waiting("all_reduce")},
        dict.fromkeys(range(3), IDLE),
    ],
)
def test_find_cause_is_none_if_no_rank_differs_from_most(activities):
    assert find_cause(activities) is None


def test_find_cause_skips_a_waiting_rank_with_an_idle_gpu():
    assert find_cause(LAYERS | {1: replace(waiting("wait"), is_idle=True)}).rank != 1


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


def test_read_activity_finds_the_collective_and_its_caller():
    assert read_activity(STACK) == RankActivity("join (worker.py:209)", "init_process_group")
    assert read_activity("Fatal Python error: Segmentation fault") is None


FRAME = 'Current thread 0x00007e (most recent call first):\n  File "{}", line 1 in {}\n'


@pytest.mark.parametrize(
    ("line", "on_cpu", "on_cuda"),
    [("work = send()", None, None), ("kv = arriving.wait()", "wait", "wait"),
     ("x = norm.item()", None, "item"), ("x = ends.tolist()", None, "tolist"),
     ("x = losses.cpu()", None, "cpu")],
)  # fmt: skip
def test_read_activity_reads_waits_in_c_from_the_source_line(tmp_path, line, on_cpu, on_cuda):
    """Reading a tensor waits on a GPU and computes on a CPU."""
    own = tmp_path / "own.py"
    own.write_text(line)
    stack = FRAME.format(own, "step")
    assert [read_activity(stack, device).collective for device in ("cpu", "cuda")] == [on_cpu, on_cuda]


def test_read_activity_counts_a_wait_for_the_gpu():
    torch_cuda = "/x/lib/python3.11/site-packages/torch/cuda/__init__.py"
    assert read_activity(FRAME.format(torch_cuda, "synchronize")).collective == "synchronize"
