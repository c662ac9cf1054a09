"""The harness says what it costs, and when that is more than it promised."""

import numpy as np
import pytest

from bench.config import ExitCode
from bench.overhead import __main__ as command
from bench.overhead.cells import GOAL_RATIO, GOAL_S, FixedCosts
from bench.overhead.comparison import StepCosts, step_costs
from tests.cells import make_cell
from tests.faults import slow_down_timed_steps

SMALL = (*command.STEP_WORDS, "seq_len=256")
FEW = 6
"""The fewest rounds that give an interval."""
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
        collectives={"bare": 7, "harness": collectives},
    )


@pytest.mark.parametrize(
    ("log_ratios", "collectives", "missed", "is_noisy"),
    [
        (QUIET, 7, [], False),
        (QUIET + 0.02, 7, [], False),
        (QUIET + 0.1, 7, ["1.105"], False),
        (QUIET - 0.1, 7, ["0.905"], False),
        (QUIET, 8, ["7 collective calls, not 8"], False),
        (NOISY, 8, ["collective"], True),
        (NOISY, 7, [], True),
        (NOISY + 0.5, 7, ["1.649"], True),
    ],
)
def test_a_goal_is_missed_where_the_interval_lies_off_it_and_noise_alone_misses_nothing(
    log_ratios, collectives, missed, is_noisy
):
    costs = costs_of(log_ratios, collectives)
    assert [word in line for word, line in zip(missed, costs.missed(), strict=True)] == [True] * len(missed)
    assert (costs.noise is not None) is is_noisy


def test_the_ranks_run_as_many_rounds_as_asked_for(launcher):
    costs = step_costs(make_cell(*SMALL), launcher, FEW)
    assert len(costs.log_ratios) == len(costs.bare_ms) == FEW
    assert costs.collectives["harness"] == costs.collectives["bare"] > 0


def test_a_slowed_timed_step_and_its_added_collective_are_found_in_a_few_rounds(launcher):
    costs = step_costs(make_cell(*SMALL), launcher, FEW, entry=slow_down_timed_steps)
    assert costs.ratio > 1.1
    assert costs.collectives["harness"] == costs.collectives["bare"] + 2
    assert len(costs.missed()) == 2


@pytest.mark.parametrize(
    ("log_ratios", "code", "said"),
    [(QUIET, 0, "all goals met"), (NOISY, 0, "too noisy here"), (QUIET + 0.1, 1, "missed: ")],
)
def test_the_short_command_ends_with_what_became_of_its_goal(monkeypatch, capsys, log_ratios, code, said):
    monkeypatch.setattr(command, "step_costs", lambda *_: costs_of(log_ratios))
    with pytest.raises(SystemExit) as ended:
        command.main(["--short", "--lease=none"])
    assert (ended.value.code, capsys.readouterr().out.splitlines()[-1][: len(said)]) == (code, said)


@pytest.mark.parametrize("words", [["--repeats", "0"], ["seq_len=8q"]])
def test_a_request_that_cannot_run_is_one_line_and_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert (ended.value.code, len(capsys.readouterr().err.splitlines())) == (ExitCode.REQUEST_WRONG, 1)
