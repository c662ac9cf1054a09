"""What the cost model says of a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analysis.published.choices import Words
from analysis.published.claimed import claimed_range, distance, number_of, range_label
from analysis.published.metrics import FURTHER, METRIC_TABLE, Metric, Question, Room, room
from analysis.published.model import CostModel
from analysis.published.opinion import Opinion, Verdict, without
from analysis.published.registry import Claim
from analysis.published.setup import Setup
from bench.config import ConfigError
from bench.cost.band import Band


def by_model(claim: Claim, setup: Setup, model: CostModel) -> Opinion:
    """A verdict, or why the model has none."""
    metric = METRIC_TABLE[claim.metric]
    asked = Question(claim, setup.settings, setup.base, model)
    try:
        found = OF_MODEL.get(claim.metric, _by_band)(asked, metric)
    except ConfigError as error:
        return without("settings", "as stated", str(error))
    also = _as_stated(asked, metric, setup.stated)
    return Opinion(found.verdict, f"{found.why}{also}", found.missing)


def _as_stated(asked: Question, metric: Metric, stated: Words | None) -> str:
    """The figure for the set-up that the source states, where its numbers were read as another's."""
    if stated is None or metric.figure is None:
        return ""
    changed = {key: value for key, value in stated.items() if asked.settings[key] != value}
    base = None if asked.base is None else {**asked.base, **changed}
    band, own = metric.figure(Question(asked.claim, stated, base, asked.model)), metric.figure(asked)
    if band is None or band == own:
        return ""
    words = ", ".join(f"{key}={str(value).lower()}" for key, value in changed.items())
    return f"; with {words}, as stated, {range_label(band.low, band.high)}"


def _by_band(asked: Question, metric: Metric) -> Opinion:
    band = metric.figure(asked) if metric.figure else None
    if band is None:
        return without("metric", asked.claim.metric, metric.why_not)
    why = f"{number_of(asked.claim)} claimed, {range_label(band.low, band.high)} {metric.unit} by the model"
    return Opinion(against_band(claimed_range(asked.claim), band, metric.tolerance), why)


def against_band(claimed: tuple[float, float], band: Band, tolerance: float) -> Verdict:
    """Inside the band consistent; further outside than its own width or the tolerance inconsistent.

    All as factors; from a figure of nothing every other is infinitely far.
    """
    off = distance(claimed, (band.low, band.high))
    if off <= 1:
        return Verdict.CONSISTENT
    edge = min(band.high / band.low, 1 + tolerance) if band.low > 0 else 1 + tolerance
    return Verdict.UNDECIDED if off <= edge else Verdict.INCONSISTENT


def _by_fit(asked: Question, metric: Metric) -> Opinion:
    """The need against what a rank may take, as any other number against a band."""
    here = room(asked)
    agrees = Verdict.CONSISTENT if here is not None and here.runs_out is bool(asked.claim.value) else None
    return _of_room(here, metric, agrees or Verdict.INCONSISTENT)


def _by_limit(asked: Question, metric: Metric) -> Opinion:
    """A longest length is right where it may fit and FURTHER times as much may not."""
    here, further = room(asked), room(asked, FURTHER)
    if here is None or further is None or here.runs_out:
        return _of_room(here, metric, Verdict.INCONSISTENT)
    if further.runs_out is False:
        why = f"{here}; {FURTHER:g} times the length fits, too: its limit may be another than memory"
        return Opinion(Verdict.UNDECIDED, why)
    return Opinion(Verdict.CONSISTENT, f"{here}; {FURTHER:g} times the length {further}")


def _of_room(here: Room | None, metric: Metric, verdict: Verdict) -> Opinion:
    """The verdict, unless the need is at the edge of what there is."""
    if here is None:
        return without("hardware", None, "its usable memory is not known")
    is_near = here.runs_out is None or (
        verdict is Verdict.INCONSISTENT and here.distance <= 1 + metric.tolerance
    )
    return Opinion(Verdict.UNDECIDED if is_near else verdict, str(here))


OF_MODEL: Mapping[str, Callable[[Question, Metric], Opinion]] = {"oom": _by_fit, "max_seq_len": _by_limit}
"""Metrics that a memory verdict decides, not a band; `_by_band` does all others."""
