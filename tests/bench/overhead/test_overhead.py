"""The harness says what it costs, and when that is more than it promised."""

import time

import numpy as np
import pytest

from bench.config import ExitCode
from bench.overhead.__main__ import STEP_WORDS, main
from bench.overhead.cells import GOAL_RATIO, GOAL_S, FixedCosts
from bench.overhead.comparison import INSTRUMENTS, StepCosts, step_costs
from bench.overhead.goal import FULL, LEAST_ROUNDS, SHORT, Verdict
from tests.cells import make_cell
from tests.faults import slow_down_timed_steps

SMALL = (*STEP_WORDS, "seq_len=256")
QUIET, NOISY = np.linspace(-0.02, 0.02, 40), np.linspace(-0.3, 0.3, 40)


@pytest.mark.parametrize(
    ("warm_s", "torchrun_s", "missed"),
    [
        (0.1, 1.0, []),
        (GOAL_S, 20.0, ["under 3.0 s"]),
        (1.0, 1.0 / GOAL_RATIO, ["ratio"]),
        (4.0, 10.0, ["under", "ratio"]),
    ],
)
def test_a_later_cell_has_to_start_in_seconds_and_in_a_part_of_what_torchrun_takes(
    warm_s, torchrun_s, missed
):
    said = FixedCosts(9.0, [warm_s] * 3, [torchrun_s] * 3).missed()
    assert [word in line for word, line in zip(missed, said, strict=True)] == [True] * len(missed)


def costs_of(log_ratios, collectives=7):
    return StepCosts(
        log_ratios=log_ratios,
        bare_ms=[20.0] * len(log_ratios),
        paired_s=60.0,
        times_ms={"bare": []},
        collectives={"bare": 7, "harness": collectives},
    )


@pytest.mark.parametrize(
    ("log_ratios", "collectives", "missed", "undecided"),
    [
        (QUIET, 7, [], []),
        (QUIET + 0.1, 7, ["1.105"], []),
        (QUIET, 8, ["7 collective calls, not 8"], []),
        (NOISY, 8, ["collective"], ["--minutes"]),
        (NOISY, 7, [], ["1.0 minutes of 40 rounds"]),
    ],
)
def test_a_goal_is_met_missed_or_undecided_and_each_is_said(log_ratios, collectives, missed, undecided):
    costs = costs_of(log_ratios, collectives)
    for words, lines in ((missed, costs.missed(FULL)), (undecided, costs.undecided(FULL, 10.0))):
        assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * len(words)


def test_the_ranks_run_every_kind_of_step_and_as_many_rounds_as_give_an_interval(launcher):
    costs = step_costs(make_cell(*SMALL), launcher, FULL, time.monotonic(), instrument_rounds=2)
    assert set(costs.times_ms) == {"bare", "harness", *INSTRUMENTS}
    assert {len(times) for times in costs.times_ms.values()} == {1}
    assert all(time_ms > 0 for times in costs.times_ms.values() for time_ms in times)
    assert len(costs.log_ratios) == len(costs.bare_ms) == LEAST_ROUNDS
    assert costs.collectives["harness"] == costs.collectives["bare"] > 0


def test_a_slowed_timed_step_and_its_added_collective_are_found_within_the_least_rounds(launcher):
    cell = make_cell(*SMALL)
    costs = step_costs(cell, launcher, SHORT, time.monotonic(), 0, entry=slow_down_timed_steps)
    assert costs.estimate.ratio > 1.1
    assert SHORT.verdict(costs.estimate) is Verdict.MISSED
    assert costs.collectives["harness"] == costs.collectives["bare"] + 2
    assert len(costs.missed(SHORT)) == 2


@pytest.mark.slow  # `.ci/run` types the command
def test_the_short_command_ends_with_what_became_of_its_goal(launcher, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--short", "--minutes", "0.001"], launcher)
    *_, last = capsys.readouterr().out.splitlines()
    assert ended.value.code == ExitCode.FAILED
    assert last.startswith(("undecided: ", "missed: "))


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--repeats", "0"], ["seq_len=8q"]])
def test_a_request_that_cannot_run_is_one_line_and_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, len(capsys.readouterr().err.splitlines())) == (ExitCode.REQUEST_WRONG, 1)
