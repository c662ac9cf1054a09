"""What measured records of a comparable set-up say of a claim."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.published.claimed import claimed_range, distance, number_of, range_label
from analysis.published.comparable import Comparable, Measured, fields_of, fields_of_base
from analysis.published.metrics import METRIC_TABLE, Metric
from analysis.published.opinion import Opinion, Verdict
from analysis.published.registry import Claim
from analysis.published.setup import Setup
from bench.labels import length_label
from bench.record import Status


def by_records(claim: Claim, setup: Setup, measured: Comparable) -> Opinion | None:
    """None where no record is comparable and says anything."""
    metric = METRIC_TABLE[claim.metric]
    own = measured.records(fields_of(setup))
    if claim.metric == "oom":
        return _oom_of_records(claim, own)
    if claim.metric == "max_seq_len":
        return _limit_of_records(claim, measured.records(fields_of(setup, but=("seq_len",))))
    if claim.metric == "speedup":
        return _held(claim, metric, _quotients(own, measured.records(fields_of_base(setup))))
    column = metric.column
    if column is None:
        return None
    also = [value for name in column.also for value in own.values(name, column.per)]
    return _held(claim, metric, own.values(column.name, column.per), also)


def _quotients(own: Measured, base: Measured) -> list[float]:
    """Each process of the one over the middle of the other."""
    below = sorted(base.values("tokens_per_s", float))
    if not below:
        return []
    middle = float(pd.Series(below).median())
    return [value / middle for value in own.values("tokens_per_s", float)]


def measured_verdict(claim: Claim, values: Sequence[float]) -> Verdict:
    """Compare a claim with the range of these measured values, in its metric's unit.

    Within the metric's tolerance the claim is as published, and beyond twice the tolerance it is not.
    """
    metric, low, high = METRIC_TABLE[claim.metric], min(values), max(values)
    claimed = claimed_range(claim)
    off = distance(claimed, (low, high))
    if off <= 1 + metric.tolerance:
        return Verdict.AS_PUBLISHED
    return Verdict.UNDECIDED if off <= 1 + 2 * metric.tolerance else metric.beyond[low > claimed[1]]


def fit_verdict(*, is_claimed_out: bool, ran_out: bool) -> Verdict:
    """Compare whether a cell ran out of memory with what was published of it."""
    if is_claimed_out:
        return Verdict.OUT_AS_PUBLISHED if ran_out else Verdict.RAN
    return Verdict.RAN_OUT if ran_out else Verdict.AS_PUBLISHED


def _held(
    claim: Claim, metric: Metric, values: Sequence[float], also: Sequence[float] = ()
) -> Opinion | None:
    """Judge by a value of each process, and by other values that the claim may mean."""
    if not values:
        return None
    every = [*values, *also]
    count = f"{len(values)} {'process' if len(values) == 1 else 'processes'}"
    measured = range_label(min(every), max(every))
    why = f"{number_of(claim)} claimed, measured {measured} {metric.unit} in {count}"
    verdict = measured_verdict(claim, every)
    if verdict is Verdict.UNDECIDED:
        why = f"{why}, within twice the tolerance of {metric.tolerance:.0%}"
    return Opinion(verdict, why)


def _oom_of_records(claim: Claim, own: Measured) -> Opinion | None:
    ends = own.statuses & {Status.OK, Status.OUT_OF_MEMORY}
    if not ends:
        return None
    if len(ends) > 1:
        return Opinion(Verdict.UNDECIDED, "measured: some processes ran out of memory and some did not")
    ran_out = ends == {Status.OUT_OF_MEMORY}
    verdict = fit_verdict(is_claimed_out=bool(claim.value), ran_out=ran_out)
    return Opinion(verdict, f"measured: {'out of memory' if ran_out else 'there was room'}")


def _limit_of_records(claim: Claim, others: Measured) -> Opinion | None:
    """A longest length is repeated where it ran, and contradicted where as long or shorter did not fit."""
    ran = others.lengths(Status.OK)
    failed = others.lengths(Status.OUT_OF_MEMORY)
    if any(length >= claimed_range(claim)[0] for length in ran):
        return Opinion(Verdict.AS_PUBLISHED, f"measured: {length_label(max(ran))} fits")
    if any(length <= claimed_range(claim)[1] for length in failed):
        return Opinion(Verdict.CONTRADICTED, f"measured: {length_label(min(failed))} does not fit")
    return None
