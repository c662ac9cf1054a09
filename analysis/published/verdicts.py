"""What is to be thought of a claim: by the records of a comparable set-up, else by the cost model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from analysis.labels import number_label
from analysis.published.choices import Words
from analysis.published.comparable import Comparable, Measured, fields_of, fields_of_base
from analysis.published.metrics import FURTHER, METRIC_TABLE, Metric, Model, Question, Room, room
from analysis.published.registry import Claim, Registry
from analysis.published.setup import Difference, Setup, open_questions, setup_of
from bench.config import ConfigError
from bench.cost.band import Band
from bench.labels import length_label
from bench.record import Status


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    """By measured records of a comparable set-up."""
    CONTRADICTED = "contradicted"
    """By the same."""
    CONSISTENT = "consistent with the model"
    INCONSISTENT = "inconsistent with the model"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One claim's verdict, and why."""

    claim: Claim
    verdict: Verdict
    why: str
    setup: Setup
    differences: Sequence[Difference]
    """Between the claim's set-up and the cell that it was held against."""

    @property
    def missing(self) -> list[Difference]:
        """The fields for which nothing here is comparable."""
        return [each for each in self.differences if each.is_decisive]

    @property
    def is_by_records(self) -> bool:
        return self.verdict in (Verdict.REPRODUCED, Verdict.CONTRADICTED)


@dataclass(frozen=True, slots=True)
class Opinion:
    """A verdict on one side's word."""

    verdict: Verdict
    why: str
    missing: Sequence[Difference] = ()
    """Why it has none, where the claim is not comparable."""


def _without(field: str, published: str | None, here: str) -> Opinion:
    missing = Difference(field, published, here)
    return Opinion(Verdict.NOT_COMPARABLE, str(missing), [missing])


@dataclass(frozen=True, slots=True)
class Case:
    """One claim as it is judged."""

    claim: Claim
    setup: Setup
    left_open: Sequence[Difference]
    """Settings that decide its number and that its source leaves open."""
    conflicts: Sequence[Claim] = ()
    """Other numbers that its source gives for the same set-up."""

    @property
    def metric(self) -> Metric:
        return METRIC_TABLE[self.claim.metric]

    @property
    def missing(self) -> list[Difference]:
        """What nothing here has, of the set-up or of the number itself."""
        return [*self.setup.missing, *_without_figure(self.claim, self.metric)]


def judged(
    registry: Registry,
    model: Model,
    measured: Comparable,
    wanted: Callable[[Claim], bool] = lambda _: True,
) -> list[Judgement]:
    """Every wanted claim's verdict, in the registry's order; of no records the model alone decides."""
    return [_judgement(case, model, measured) for case in _cases(registry) if wanted(case.claim)]


def decided(registry: Registry, measured: Comparable) -> list[Judgement]:
    """The claims that records decide, without a word of the model."""
    if measured.frame.empty:
        return []
    cases = [case for case in _cases(registry) if not case.missing and not case.left_open]
    said = [(case, _by_records(case, measured)) for case in cases]
    return [
        Judgement(case.claim, found.verdict, found.why, case.setup, case.setup.assumed)
        for case, found in said
        if found is not None and found.verdict in BY_RECORDS
    ]


BY_RECORDS = (Verdict.REPRODUCED, Verdict.CONTRADICTED)


def _cases(registry: Registry) -> list[Case]:
    setups = {claim.id: setup_of(claim, registry) for claim in registry.claims}
    conflicts = _conflicts(registry, setups)
    return [
        Case(claim, setups[claim.id], [*open_questions(claim, registry)], conflicts[claim.id])
        for claim in registry.claims
    ]


def _judgement(case: Case, model: Model, measured: Comparable) -> Judgement:
    found = _opinion(case, model, measured)
    differences = [*found.missing, *case.setup.assumed]
    return Judgement(case.claim, found.verdict, found.why, case.setup, differences)


def nearest_record(judgement: Judgement, measured: Comparable) -> str | None:
    """In what the closest record differs from a claim; None where records decided, or without any."""
    return None if judgement.is_by_records else measured.nearest(fields_of(judgement.setup))


def _opinion(case: Case, model: Model, measured: Comparable) -> Opinion:
    """By records where they say anything; what a source leaves open no record decides."""
    if case.missing:
        return Opinion(Verdict.NOT_COMPARABLE, "; ".join(map(str, case.missing)), case.missing)
    if case.left_open:
        return _as_taken(case, _by_model(case, model))
    found = _by_records(case, measured) or _by_model(case, model)
    if found.verdict is Verdict.CONSISTENT and case.conflicts:
        others = ", ".join(f"{other.id} {_shown(other)}" for other in case.conflicts)
        return Opinion(Verdict.UNDECIDED, f"{found.why}; its own source also gives {others}")
    return found


def _as_taken(case: Case, found: Opinion) -> Opinion:
    """Undecided, with what the model says of the set-up as it is taken here."""
    if found.missing:
        return found
    fields = "; ".join(map(str, case.left_open))
    return Opinion(Verdict.UNDECIDED, f"{fields}; as it is taken here {found.verdict}: {found.why}")


def _without_figure(claim: Claim, metric: Metric) -> Iterator[Difference]:
    if metric.figure is None and metric.column is None and claim.metric not in OF_MODEL:
        yield Difference("metric", claim.metric, metric.why_not)


def _by_records(case: Case, measured: Comparable) -> Opinion | None:
    """None where no record is comparable and says anything."""
    claim, metric, setup = case.claim, case.metric, case.setup
    own = measured.records(fields_of(setup))
    if claim.metric == "oom":
        return _oom_of_records(claim, own)
    if claim.metric == "max_seq_len":
        return _limit_of_records(claim, measured.records(fields_of(setup, but=("seq_len",))))
    if claim.metric == "speedup":
        return _held(claim, metric, _quotients(own, measured.records(fields_of_base(setup))))
    column = metric.column
    return None if column is None else _held(claim, metric, own.values(column.name, column.per))


def _quotients(own: Measured, base: Measured) -> list[float]:
    """Each process of the one over the middle of the other."""
    below = sorted(base.values("tokens_per_s", float))
    if not below:
        return []
    middle = float(pd.Series(below).median())
    return [value / middle for value in own.values("tokens_per_s", float)]


def _held(claim: Claim, metric: Metric, values: Sequence[float]) -> Opinion | None:
    """A measured range, widened by the tolerance, that holds the claim repeats it."""
    if not values:
        return None
    low, high = min(values), max(values)
    count = f"{len(values)} {'process' if len(values) == 1 else 'processes'}"
    why = f"{_shown(claim)} claimed, measured {_range(low, high)} {metric.unit} in {count}"
    off = _distance(claimed_range(claim), (low, high))
    if off <= 1 + metric.tolerance:
        return Opinion(Verdict.REPRODUCED, why)
    if off <= 1 + 2 * metric.tolerance:
        return Opinion(Verdict.UNDECIDED, f"{why}, within twice the tolerance of {metric.tolerance:.0%}")
    return Opinion(Verdict.CONTRADICTED, why)


def _oom_of_records(claim: Claim, own: Measured) -> Opinion | None:
    ends = own.statuses & {Status.OK, Status.OUT_OF_MEMORY}
    if not ends:
        return None
    if len(ends) > 1:
        return Opinion(Verdict.UNDECIDED, "measured: some processes ran out of memory and some did not")
    ran_out = ends == {Status.OUT_OF_MEMORY}
    verdict = Verdict.REPRODUCED if ran_out == bool(claim.value) else Verdict.CONTRADICTED
    return Opinion(verdict, f"measured: {'out of memory' if ran_out else 'there was room'}")


def _limit_of_records(claim: Claim, others: Measured) -> Opinion | None:
    """A longest length is repeated where it ran, and contradicted where as long or shorter did not fit."""
    ran = others.lengths(Status.OK)
    failed = others.lengths(Status.OUT_OF_MEMORY)
    if any(length >= claimed_range(claim)[0] for length in ran):
        return Opinion(Verdict.REPRODUCED, f"measured: {length_label(max(ran))} fits")
    if any(length <= claimed_range(claim)[1] for length in failed):
        return Opinion(Verdict.CONTRADICTED, f"measured: {length_label(min(failed))} does not fit")
    return None


def _by_model(case: Case, model: Model) -> Opinion:
    claim, metric, setup = case.claim, case.metric, case.setup
    asked = Question(claim, setup.settings, setup.base, model)
    try:
        found = OF_MODEL.get(claim.metric, _by_band)(asked, metric)
    except ConfigError as error:
        return _without("settings", "as stated", str(error))
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
    return f"; with {words}, as stated, {_range(band.low, band.high)}"


def _by_band(asked: Question, metric: Metric) -> Opinion:
    band = metric.figure(asked) if metric.figure else None
    if band is None:
        return _without("metric", asked.claim.metric, metric.why_not)
    why = f"{_shown(asked.claim)} claimed, {_range(band.low, band.high)} {metric.unit} by the model"
    return Opinion(against_band(claimed_range(asked.claim), band, metric.tolerance), why)


def against_band(claimed: tuple[float, float], band: Band, tolerance: float) -> Verdict:
    """Inside the band consistent; further outside than its own width or the tolerance inconsistent.

    All as factors, since every figure is positive.
    """
    off = _distance(claimed, (band.low, band.high))
    if off <= 1:
        return Verdict.CONSISTENT
    edge = min(band.high / band.low, 1 + tolerance)
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
        return _without("hardware", None, "its usable memory is not known")
    is_near = here.runs_out is None or (
        verdict is Verdict.INCONSISTENT and here.distance <= 1 + metric.tolerance
    )
    return Opinion(Verdict.UNDECIDED if is_near else verdict, str(here))


OF_MODEL: Mapping[str, Callable[[Question, Metric], Opinion]] = {"oom": _by_fit, "max_seq_len": _by_limit}
"""Metrics that a memory verdict decides, not a band; `_by_band` does all others."""


def claimed_range(claim: Claim) -> tuple[float, float]:
    """The published number with what its digits, or the chart it was read off, leave open."""
    value, error = float(claim.value), _half_a_digit(claim.value)
    chart = re.search(r"\+-\s*([\d.]+)", claim.read_from)
    error = max(error, float(chart[1])) if chart else error
    return value - error, value + error


def _half_a_digit(value: float) -> float:
    """Half a unit of the last digit that is not a trailing zero of a whole number."""
    text = repr(value).removesuffix(".0")
    if "e" in text:
        return abs(value) / 20
    whole, _, decimals = text.partition(".")
    return 0.5 * 10.0 ** -len(decimals) if decimals else 0.5 * 10.0 ** (len(whole) - len(whole.rstrip("0")))


def _distance(claimed: tuple[float, float], found: tuple[float, float]) -> float:
    """The factor between two ranges that do not meet, 1 for those that do."""
    if claimed[0] > found[1]:
        return claimed[0] / found[1]
    return found[0] / claimed[1] if found[0] > claimed[1] else 1.0


def _conflicts(registry: Registry, setups: Mapping[str, Setup]) -> Mapping[str, Sequence[Claim]]:
    """Per claim those of the same source, set-up and metric that give another number."""
    together: dict[tuple[object, ...], list[Claim]] = defaultdict(list)
    for claim in registry.claims:
        settings = tuple(sorted(setups[claim.id].settings.items(), key=str))
        software = tuple(sorted(claim.software.items(), key=str))
        together[claim.source.title, claim.metric, claim.system, settings, software].append(claim)
    return {
        claim.id: [other for other in alike if _differs(claim, other)]
        for alike in together.values()
        for claim in alike
    }


def _differs(one: Claim, other: Claim) -> bool:
    tolerance = METRIC_TABLE[one.metric].tolerance
    return _distance(claimed_range(one), claimed_range(other)) > 1 + tolerance


def _shown(claim: Claim) -> str:
    if isinstance(claim.value, bool):
        return str(claim.value).lower()
    return f"{number_label(claim.value)} {METRIC_TABLE[claim.metric].unit}"


def _range(low: float, high: float) -> str:
    shown = number_label(low), number_label(high)
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"
