"""The harness says what it costs, and when that is more than it promised."""

import subprocess
import sys

import pytest

from bench.overhead.__main__ import COMPARED, STEP_WORDS, _missed_step_goal, _step_times_ms
from bench.statistics import Interval
from tests.cells import make_cell


@pytest.mark.parametrize(
    ("low", "high", "missed"),
    [
        (0.99, 1.01, []),
        (1.001, 1.02, ["bare one"]),
        (0.9, 1.1, ["narrower"]),
        (1.1, 1.2, ["bare", "narrower"]),
    ],
)
def test_a_step_has_to_cost_what_a_bare_one_does_and_surely_so(low, high, missed):
    said = _missed_step_goal(Interval(low=low, high=high))
    assert [word in line for word, line in zip(missed, said, strict=True)] == [True] * len(missed)


def test_every_kind_of_step_is_timed_as_often_as_the_bare_one(launcher):
    cell = make_cell(*STEP_WORDS, "seq_len=256", "measure.steps=6")
    times_ms = _step_times_ms(cell, launcher)
    assert set(times_ms) == {"bare", *COMPARED}
    assert {len(times) for times in times_ms.values()} == {6}
    assert all(time > 0 for times in times_ms.values() for time in times)


@pytest.mark.parametrize("words", [["--rounds", "3"], ["--repeats", "0"], ["seq_len=8q"]])
def test_a_request_that_cannot_run_is_one_line_and_exit_code_2(words):
    command = [sys.executable, "-m", "bench.overhead", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
