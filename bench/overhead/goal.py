"""What a timed step may cost beside a bare one, and what the samples say of it: met, missed or undecided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.statistics import Interval, centre_interval

LEAST_ROUNDS = 6
"""They run whatever the time is: without an interval there is nothing to say."""
MIN_ROUNDS = 20
"""Before the first look at the width: the fewer the samples, the more often a width is small by chance."""
LOOK_AGAIN = 1.1
"""The next look comes after a tenth more rounds."""
PROGRESS_S = 10.0

Round = Callable[[], tuple[float, float]]
"""Runs one round; its log ratio, and the time in seconds after it. Both are the same on every rank."""


class Verdict(Enum):
    """What became of the goal."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A timed step over a bare one."""

    ratio: float
    interval: Interval
    rounds: int

    def __str__(self) -> str:
        return (
            f"{self.ratio:.3f} ({self.interval.low:.3f} to {self.interval.high:.3f}), n={self.rounds} rounds"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How narrow the ratio's interval has to be, and how far it may lie from 1.00."""

    half_width: float
    """The interval has to be narrower than +- this."""
    allowance: float
    """The interval has to hold a ratio within 1.00 +- this: with 0, it has to hold 1.00."""

    def is_narrow(self, estimate: Estimate) -> bool:
        return estimate.rounds >= MIN_ROUNDS and estimate.interval.half_width < self.half_width

    def verdict(self, estimate: Estimate) -> Verdict:
        """Missed where the interval lies off the goal, however wide it is; met where it is narrow, too."""
        if not self._reaches(estimate.interval):
            return Verdict.MISSED
        if not self.is_narrow(estimate):
            return Verdict.UNDECIDED
        far = abs(estimate.ratio - 1) > self.allowance + self.half_width
        return Verdict.MISSED if far else Verdict.MET

    def _reaches(self, interval: Interval) -> bool:
        return interval.low <= 1 + self.allowance and interval.high >= 1 - self.allowance

    def __str__(self) -> str:
        where = f"a ratio within 1.00 +-{self.allowance}" if self.allowance else "1.00"
        return f"the interval holds {where} and is narrower than +-{self.half_width}"


FULL = Goal(half_width=0.02, allowance=0.0)
SHORT = Goal(half_width=0.05, allowance=0.10)
"""Wide enough for a busy machine in a minute; a step that takes 20 % more lies outside."""


def estimated(log_ratios: Sequence[float]) -> Estimate:
    """Of LEAST_ROUNDS or more, each the mean of log(timed / bare): their centre, as a ratio.

    Rounds are symmetric about it: where the two kinds of step differ by a factor only, exchanging them turns
    a round's deviation into its negative, and every other round is exchanged.
    """
    centre, interval = centre_interval(log_ratios)
    assert interval is not None
    as_ratios = Interval(low=math.exp(interval.low), high=math.exp(interval.high))
    return Estimate(math.exp(centre), as_ratios, len(log_ratios))


def until_narrow(goal: Goal, deadline_s: float, one_round: Round, tell: Callable[[str], None]) -> list[float]:
    """The log ratios of as many rounds as make the interval narrow, or as end before the deadline.

    What stops it is the interval's width alone, never where the interval lies: who stops at the first
    interval that holds 1.00, or that leaves it out, finds what was looked for far more often than in one of
    twenty cases. Stopping on the width keeps the interval's confidence in the limit of narrow intervals
    (Y. S. Chow and H. Robbins, On the asymptotic theory of fixed-width sequential confidence intervals for
    the mean, 1965; of correlated samples P. W. Glynn and W. Whitt, The asymptotic validity of sequential
    stopping rules for stochastic simulations, 1992). How near that comes here is simulated in the tests.
    """
    log_ratios: list[float] = []
    next_look, told_s = MIN_ROUNDS, -math.inf
    while True:
        log_ratio, now_s = one_round()
        log_ratios.append(log_ratio)
        if len(log_ratios) < LEAST_ROUNDS:
            continue
        if len(log_ratios) >= next_look:
            if goal.is_narrow(estimated(log_ratios)):
                return log_ratios
            next_look = math.ceil(LOOK_AGAIN * len(log_ratios))
        if now_s >= deadline_s:
            return log_ratios
        if now_s >= told_s + PROGRESS_S:
            tell(f"{estimated(log_ratios)}, {deadline_s - now_s:.0f} s left")
            told_s = now_s


def minutes_needed(goal: Goal, estimate: Estimate, minutes: float) -> float:
    """Minutes of rounds until the interval is narrow, by its width after these minutes of them.

    The width falls with the root of the number of rounds.
    """
    by_width = (estimate.interval.half_width / goal.half_width) ** 2
    return minutes * max(by_width, MIN_ROUNDS / estimate.rounds)
