"""The command counts false and found differences, and says when there are too many or too few."""

import re

import numpy as np
import pytest

from analysis.cells.difference import Processes
from analysis.false_differences import Trials, main, missed_goals, trials
from bench.statistics import MAX_PROCESSES, MIN_PROCESSES, share_interval
from tests.analysis.records import make_record, make_timing, write_sweep


def processes(count, effect, drift=0.0):
    """Of one cell, in order of time, on a machine that slows down by `drift` from each to the next."""
    random = np.random.default_rng(0)
    rates = 100 * np.exp(effect * random.standard_normal(count) - drift * np.arange(count))
    return Processes(tuple(rates), tuple(f"2026-01-01T{n // 60:02d}:{n % 60:02d}" for n in range(count)))


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_of_independent_processes_few_are_called_different_and_slower_ones_are_found(drift):
    result = trials([processes(240, 0.02, drift)], 500)
    assert result.claimed / result.n <= 0.05
    assert result.found / result.n >= (0.8 if drift == 0 else 0)
    assert missed_goals(Trials(result.n, result.claimed, result.n)) == []


def test_processes_that_differ_by_more_than_the_slowdown_hide_it_and_that_is_a_miss():
    (said,) = missed_goals(trials([processes(240, 0.2)], 300))
    assert "10%" in said


def test_more_false_differences_than_chance_explains_are_a_miss():
    assert missed_goals(Trials(200, 16, 200)) == []
    assert share_interval(16, 200).low <= 0.05 < share_interval(17, 200).low
    (said,) = missed_goals(Trials(200, 17, 200))
    assert "at most 5%" in said


def test_processes_that_spread_further_are_compared_in_larger_numbers_and_the_slowdown_is_found():
    quiet, noisy = (trials([processes(240, effect)], 400) for effect in (0.02, 0.09))
    assert max(quiet.processes) == MIN_PROCESSES < sum(noisy.processes) / noisy.n < MAX_PROCESSES
    assert noisy.found / noisy.n >= 0.7
    assert noisy.claimed / noisy.n <= 0.07


@pytest.fixture
def swept(tmp_path):
    """The folder of a sweep of one cell in so many processes."""

    def sweep(count, effect=0.01, **overrides):
        random = np.random.default_rng(0)
        records = [
            make_record(
                timing=make_timing([[100 * np.exp(effect * random.normal())] * 6] * 2),
                repeat=repeat,
                order=repeat,
                started_at=f"2026-01-01T00:{repeat:02d}:00+00:00",
                **overrides,
            )
            for repeat in range(count)
        ]
        return str(write_sweep(tmp_path / "sweep", records))

    return sweep


def test_it_prints_both_shares_with_their_intervals_and_ends_well(swept, capsys):
    assert main([swept(40), "--comparisons", "300"]) == 0
    said = capsys.readouterr().out
    assert "40 processes of 1 cell, 300 comparisons of 6 to 6 processes of each side, 6 in the mid" in said
    assert len(re.findall(r"\d+\.\d % \(\d+\.\d % to \d+\.\d %\)", said)) == 2
    assert said.endswith("all goals met\n")


def test_a_missed_goal_is_said_and_is_exit_code_1(swept, capsys):
    assert main([swept(40, effect=0.2), "--comparisons", "200"]) == 1
    said = capsys.readouterr().out
    assert "to 20 processes of each side" in said
    assert "missed: a slowdown by 10%" in said


@pytest.mark.parametrize(
    ("count", "overrides", "words", "said"),
    [
        (11, {}, [], "no cell has more than 11 measured processes"),
        (12, {"provenance": "predicted"}, [], "no cell has more than 0 measured processes"),
        (12, {}, ["--comparisons", "199"], "must be at least 200"),
    ],
)
def test_too_little_is_one_line_and_exit_code_2(swept, capsys, count, overrides, words, said):
    assert main([swept(count, **overrides), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
