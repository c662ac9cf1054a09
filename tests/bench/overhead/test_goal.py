"""The goal is decided by samples alone: when they are enough, and what they say."""

import math
from itertools import count

import numpy as np
import pytest

from bench.overhead.goal import (
    FULL,
    LEAST_ROUNDS,
    MIN_ROUNDS,
    SHORT,
    Estimate,
    Verdict,
    estimated,
    minutes_needed,
    until_narrow,
)
from bench.overhead.turns import ORDER
from bench.statistics import Interval

MAX_ROUNDS = 150


def sampled(goal, log_ratios, deadline_s=math.inf, said=None):
    """What `until_narrow` takes of these, a round a second."""
    rounds = zip(log_ratios, count(1.0))
    return until_narrow(goal, deadline_s, lambda: next(rounds), (said if said is not None else []).append)


@pytest.mark.parametrize(
    ("goal", "low", "ratio", "high", "rounds", "verdict"),
    [
        (FULL, 0.985, 1.00, 1.015, 40, Verdict.MET),
        (FULL, 0.995, 1.01, 1.025, 40, Verdict.MET),
        (FULL, 1.001, 1.01, 1.02, 40, Verdict.MISSED),
        (FULL, 0.97, 0.98, 0.99, 40, Verdict.MISSED),
        (FULL, 0.999, 1.03, 1.035, 40, Verdict.MISSED),
        (FULL, 1.10, 1.20, 1.30, 7, Verdict.MISSED),
        (FULL, 0.979, 1.00, 1.021, 400, Verdict.UNDECIDED),
        (FULL, 0.985, 1.00, 1.015, MIN_ROUNDS - 1, Verdict.UNDECIDED),
        (SHORT, 1.02, 1.05, 1.09, 40, Verdict.MET),
        (SHORT, 1.09, 1.16, 1.17, 40, Verdict.MISSED),
        (SHORT, 1.12, 1.20, 1.28, 40, Verdict.MISSED),
        (SHORT, 1.00, 1.10, 1.20, 40, Verdict.UNDECIDED),
    ],
)  # fmt: skip
def test_the_verdict_is_read_off_where_the_interval_lies_and_how_narrow_it_is(
    goal, low, ratio, high, rounds, verdict
):
    assert goal.verdict(Estimate(ratio, Interval(low=low, high=high), rounds)) is verdict


def test_sampling_ends_at_the_first_look_at_a_narrow_interval():
    wide = list(np.random.default_rng(0).normal(0, 0.2, MAX_ROUNDS))
    assert len(sampled(FULL, [0.0] * MAX_ROUNDS)) == MIN_ROUNDS
    assert MIN_ROUNDS < len(sampled(SHORT, wide)) < MAX_ROUNDS


def test_sampling_ends_at_the_deadline_with_as_many_rounds_as_give_an_interval():
    noise = list(np.random.default_rng(0).normal(0, 0.5, MAX_ROUNDS))
    assert len(sampled(FULL, noise, deadline_s=50)) == 50
    few = sampled(FULL, noise, deadline_s=0)
    assert len(few) == LEAST_ROUNDS
    assert FULL.verdict(estimated(few)) is Verdict.UNDECIDED


def test_progress_is_told_every_ten_seconds():
    said = []
    sampled(FULL, np.random.default_rng(0).normal(0, 0.5, MAX_ROUNDS), deadline_s=40, said=said)
    assert [line.rpartition(", ")[2] for line in said] == ["34 s left", "24 s left", "14 s left", "4 s left"]


def test_the_minutes_named_are_those_that_make_the_interval_narrow():
    wide = Estimate(1.0, Interval(low=0.96, high=1.04), 100)
    assert minutes_needed(FULL, wide, minutes=2) == pytest.approx(8)
    few = Estimate(1.0, Interval(low=0.99, high=1.01), MIN_ROUNDS // 2)
    assert minutes_needed(FULL, few, minutes=2) == pytest.approx(4)


def rounds_of(step_noise):
    """Rounds' mean differences of the two kinds, where steps [MAX_ROUNDS * 16] differ by this noise alone."""
    signs = np.array([1 if place == "1" else -1 for place in ORDER])
    exchanged = np.where(np.arange(MAX_ROUNDS) % 2, -1, 1)
    return (step_noise.reshape(MAX_ROUNDS, len(ORDER)) * signs).sum(1) * exchanged / (len(ORDER) / 2)


def autoregressive(random, lag_1, n):
    """Samples of variance 1 with this correlation of neighbours."""
    shocks = random.normal(0, math.sqrt(1 - lag_1**2), n)
    noise = np.empty(n)
    noise[0] = random.normal()
    for i in range(1, n):
        noise[i] = lag_1 * noise[i - 1] + shocks[i]
    return noise


def steps_of_correlated_times(random):
    """As on two busy cores: neighbours take alike long, and now and then one takes much longer."""
    n = MAX_ROUNDS * len(ORDER)
    return rounds_of(0.3 * autoregressive(random, 0.7, n) + 0.1 * random.standard_t(3, n))


def steps_that_drift(random):
    """A machine that slows down by a factor of e within the rounds."""
    n = MAX_ROUNDS * len(ORDER)
    return rounds_of(np.linspace(0, 1, n) + random.normal(0, 0.15, n))


def correlated_differences(random):
    """What sets the two kinds apart lasts: one pair of steps tells of the next, more than was ever seen."""
    pairs = 0.3 * autoregressive(random, 0.3, MAX_ROUNDS * len(ORDER) // 2)
    return pairs.reshape(MAX_ROUNDS, -1).mean(1)


@pytest.mark.parametrize("rounds", [steps_of_correlated_times, steps_that_drift, correlated_differences])
def test_an_interval_that_was_waited_for_holds_the_truth_in_nearly_95_of_100_runs(rounds):
    random, runs, held = np.random.default_rng(1), 300, 0
    for _ in range(runs):
        interval = estimated(sampled(SHORT, rounds(random))).interval
        held += interval.low <= 1 <= interval.high
    assert held / runs > 0.91


@pytest.mark.parametrize(("ratio", "missed"), [(1.0, 0), (1.05, 0), (1.2, 0.95)])
def test_the_short_form_finds_a_fifth_more_and_raises_no_false_alarm(ratio, missed):
    random, runs = np.random.default_rng(1), 100
    found = [sampled(SHORT, steps_of_correlated_times(random) + math.log(ratio)) for _ in range(runs)]
    share = sum(SHORT.verdict(estimated(log_ratios)) is Verdict.MISSED for log_ratios in found) / runs
    assert share >= missed if missed else share == 0
