"""Estimates of step times, and the progress of a cell from the stages that its ranks report."""

from dataclasses import replace

import pytest
import torch

import bench.measure.timing.rank as timing_rank
from bench.measure import planned_stages
from bench.measure.rank_pass import Measurement
from bench.measure.timing.rank import TimingPass
from bench.measure.timing.section import FIRST_STEP, WARM_UP
from bench.measure.workloads.workload import Workload
from bench.plan.estimate import FIXED_S, START_S, CellProgress, Estimate, ExpectedStep
from bench.plan.planned import PlannedCell
from bench.ranks.log import RankStage
from bench.run.cell.run import run
from bench.run.node.worker import join
from tests.support.cells import FOUR_H100, make_cell, tiny_cell

CELL = make_cell("strategy=local", "engine=ddp", "seq_len=1k", "measure.steps=4")
TRACED = ("trace",)
BUILD = ("build",)


class StageRecorder:
    """Listener that records every stage that the launcher reports."""

    def __init__(self):
        self.stages = []

    def on_stage(self, stage):
        self.stages.append(stage)

    def on_tick(self):
        pass


@pytest.mark.parametrize(
    "words", [("measure.budget_s=0.001",), ("measure.trace=false", "measure.warmup_steps=3")], ids=str
)
def test_estimate_counts_the_steps_that_a_cell_runs(launcher, tmp_path, words):
    cell = make_cell("strategy=local", "engine=ddp", "seq_len=256", "measure.steps=4", *words)
    recorder = StageRecorder()
    record = run(PlannedCell(cell, 0, 0), launcher, tmp_path, listener=recorder)
    assert record.status == "ok", record.reason
    reports = [(stage.pass_name, stage.part, stage.steps) for stage in recorder.stages if stage.steps]
    # The first step decides how many steps are timed, their median how many are traced.
    first_s = next(stage.step_s for stage in recorder.stages if stage.step_s)
    median_s = next((stage.step_s for stage in recorder.stages if stage.pass_name in TRACED), first_s)
    planned = [stage for stage in planned_stages(cell.measure, first_s) if stage.pass_name not in TRACED]
    planned += [stage for stage in planned_stages(cell.measure, median_s) if stage.pass_name in TRACED]
    assert reports == [(stage.pass_name, stage.part, stage.steps) for stage in planned if stage.steps]
    assert [stage.part for stage in recorder.stages if stage.pass_name in BUILD] == [None, "data", "model"]
    passes = list(dict.fromkeys(stage.pass_name for stage in recorder.stages))
    assert [name for name in passes if name in ("parity", "timing", "losses")] == [
        "parity",
        "timing",
        "losses",
    ]


class RecordedWorkload(Workload):
    """Workload that records its steps and advances a simulated clock; the first two steps take longer."""

    def __init__(self, events):
        self.events, self.now_s, self.device = events, 0.0, torch.device("cpu")

    def perf_counter(self):
        return self.now_s

    def time_ns(self):
        return round(self.now_s * 1e9)

    def step(self, number):
        self.now_s += STEPS_S[min(number, 2)]
        self.events.append(f"step {number}")

    def short_step(self):
        self.events.append("short step")


STEPS_S = (5.0, 4.0, 1.0)
ON_A_GPU = replace(CELL.measure, warmup_s=12.5, min_timed_steps=3, budget_s=0.5)
"""Settings of a GPU whose steps take longer than the budget."""


def timing_events(job, log):
    """Return the order of a rank's reports, steps and releases of memory, for each of three measurements."""
    device, events_of = join(job), {}
    no_least = replace(ON_A_GPU, min_timed_steps=0)
    for name, measure in (("cpu", job.cell.measure), ("gpu", ON_A_GPU), ("no least", no_least)):
        events = events_of.setdefault(name, [])
        log.report = lambda stage, events=events: events.append(stage.part or (stage.steps and "timed"))
        timing_rank.release_unused = lambda _, events=events: events.append("released")
        measurement = Measurement(measure, device, log)
        measurement.passes.clear()
        measurement.subject = timing_rank.time = RecordedWorkload(events)
        measurement.subject.run(TimingPass(measurement).run())
        events.append(f"{measurement.timed.warmup}, {measurement.timed.window_ms / 1e3:.0f} s")
    return {name: [event for event in events if event] for name, events in events_of.items()}


@pytest.fixture(scope="module")
def reports(launcher, tmp_path_factory):
    (end,) = launcher.run(CELL, tmp_path_factory.mktemp("reports"), entry=timing_events)
    assert end.report is not None, end.log_tail
    return end.report


BEFORE = ["short step", "released", FIRST_STEP, "step 0", WARM_UP, "step 1"]
ORDERS = {
    # No reports between timed steps.
    "cpu": [*BEFORE, "timed", *(f"step {n}" for n in range(2, 6)), "full, 4 s"],
    # The first steps took 5, 4 and 1 s: three more of the last make 12.5 s. Three are timed at least.
    "gpu": [*BEFORE, WARM_UP, "step 2", WARM_UP, *(f"step {n}" for n in range(3, 6)),
            "timed", *(f"step {n}" for n in range(6, 9)), "full, 3 s"],
    # Without a least number, the last step that fitted is the timed one.
    "no least": [*BEFORE, WARM_UP, "step 2", "full, 1 s"],
}  # fmt: skip


@pytest.mark.parametrize("where", ORDERS)
def test_timing_pass_reports_warm_up_and_timed_steps_in_order(reports, where):
    assert reports[where] == ORDERS[where]


@pytest.mark.parametrize(
    ("step_s", "warm_up", "timed"), [(0.01, 99, 20), (1.0, 9, 20), (9.0, 1, 3), (11.0, 0, 3), (30.0, 0, 3)]
)
def test_planned_stages_on_a_gpu_time_at_least_three_steps(step_s, warm_up, timed):
    measure = make_cell("strategy=local", machine=FOUR_H100).measure
    planned = [(stage.part, stage.steps) for stage in planned_stages(measure, step_s)]
    assert planned[:3] == [(FIRST_STEP, 1), (WARM_UP, warm_up), (None, timed)]


def test_cell_progress_shows_the_stage_and_remaining_seconds():
    now = [0.0]
    one = CellProgress(CELL, None, lambda: now[0], imports=True)
    assert one.left_s is None
    for stage, where in (
        (RankStage("join"), "join"),
        (RankStage("parity", "objective"), "parity, objective"),
        (RankStage("timing", FIRST_STEP, 1), "timing, first step"),
    ):
        one.enter(stage)
        assert one.stage_label() == where
    one.enter(RankStage("timing", None, 4, step_s=2.0))
    steps = sum(stage.steps for stage in planned_stages(CELL.measure, 2.0))
    whole_s = FIXED_S["cpu"] + START_S + 2 * steps
    for now[0], step in ((0.0, 1), (2.1, 2), (6.5, 4), (600.0, 4)):  # never past the last
        assert one.stage_label() == f"timing, step about {step}/4"
        assert one.left_s == pytest.approx(whole_s - now[0])


def test_estimate_scales_by_work_from_the_nearest_known_step():
    estimate = Estimate()
    near, far = (tiny_cell("strategy=ring", f"seq_len={n}") for n in ("32k", "1k"))
    asked = tiny_cell("strategy=ring", "seq_len=64k")
    assert estimate.step_s(asked) is None
    estimate.learn(near, 10.0)
    guess = estimate.step_s(asked)
    assert 20 < guess < 40  # attention is four times as much, the rest twice
    estimate.learn(far, 10.0)
    assert estimate.step_s(asked) == guess
    assert estimate.step_s(tiny_cell("strategy=local", "seq_len=64k")) == guess
    expected = Estimate(lambda cell: ExpectedStep(cell.seq_len / 1024, "a rule"))
    assert expected.step(asked) == ExpectedStep(64, "a rule")
    expected.learn(near, 96.0)
    assert expected.step_s(asked) == 3 * 64
