"""The overhead benchmark detects costs that the harness adds to a step, and reports missed goals."""

import numpy as np
import pytest

from tests.benchmarks.overhead import CELL, centre_interval, measure_overhead, signed_rank, verdict
from tests.support.cells import make_cell
from tests.support.faults.acts import slow_down_timed_steps

FEW = 6
"""Smallest number of rounds that gives an interval."""
QUIET, NOISY = np.linspace(-0.02, 0.02, 40), np.linspace(-0.3, 0.3, 40)


@pytest.mark.parametrize(
    ("log_ratios", "timed_calls", "missed", "last"),
    [
        (QUIET, 7, [], "all goals met"),
        (QUIET + 0.02, 7, [], "all goals met"),
        (QUIET + 0.1, 7, ["1.105"], "missed: "),
        (QUIET - 0.1, 7, ["0.905"], "missed: "),
        (QUIET, 8, ["7 collective calls, not 8"], "missed: "),
        (NOISY, 7, [], "too noisy here"),
        (NOISY, 8, ["collective"], "missed: "),
        (NOISY + 0.5, 7, ["1.649"], "missed: "),
    ],
)
def test_verdict_misses_a_goal_only_outside_its_margin(log_ratios, timed_calls, missed, last):
    calls = {"bare": 7, "timed": timed_calls}
    lines, found = verdict({"calls": calls, "log_ratios": log_ratios, "bare_ms": [20.0]})
    assert [word in line for word, line in zip(missed, found, strict=True)] == [True] * len(missed)
    assert lines[-1].startswith(last)


def test_benchmark_detects_a_slow_step_with_a_collective(launcher):
    cell = make_cell(*CELL, "seq_len=256")
    sound, slow = (
        measure_overhead(cell, launcher, FEW, **more) for more in ({}, {"entry": slow_down_timed_steps})
    )
    assert len(sound["log_ratios"]) == FEW
    assert sound["calls"]["timed"] == sound["calls"]["bare"] > 0
    assert slow["calls"]["timed"] == slow["calls"]["bare"] + 2
    assert len(verdict(slow)[1]) == 2


@pytest.mark.parametrize("n", [5, 6, 7, 12, 20, 117])
def test_signed_rank_interval_is_not_narrower_than_the_exact(n):
    counts = np.array([1.0])
    for rank in range(1, n + 1):
        counts = np.append(counts, np.zeros(rank)) + np.append(np.zeros(rank), counts)
    exact = int(np.sum(2 * np.cumsum(counts) <= 0.05 * counts.sum()))
    assert exact - 2 <= signed_rank(n) <= exact


def test_centre_interval_is_robust_to_an_outlier():
    centre, interval = centre_interval([0.8, 0.9, 1.0, 1.0, 1.1, 1.2, 90.0])
    assert (centre, interval.low, interval.high) == pytest.approx((1.05, 0.85, 45.6))
