"""What is to be thought of a claim: by the records of a comparable set-up, else by the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.published.by_model import OF_MODEL, by_model
from analysis.published.by_records import by_records
from analysis.published.claimed import claimed_range, distance, number_of
from analysis.published.comparable import Comparable, fields_of
from analysis.published.metrics import METRIC_TABLE, Metric
from analysis.published.model import CostModel
from analysis.published.opinion import Opinion, Verdict
from analysis.published.registry import Claim, Registry
from analysis.published.setup import Difference, Setup, open_questions, setup_of


@dataclass(frozen=True, slots=True)
class Judgement:
    """One claim's verdict, and why."""

    claim: Claim
    verdict: Verdict
    why: str
    setup: Setup
    differences: Sequence[Difference]
    """Between the claim's set-up and the cell that it was compared with."""


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
    model: CostModel,
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
    said = [(case, by_records(case.claim, case.setup, measured)) for case in cases]
    return [
        Judgement(case.claim, found.verdict, found.why, case.setup, case.setup.assumed)
        for case, found in said
        if found is not None and found.verdict.is_by_records
    ]


def _cases(registry: Registry) -> list[Case]:
    setups = {claim.id: setup_of(claim, registry) for claim in registry.claims}
    conflicts = _conflicts(registry, setups)
    return [
        Case(claim, setups[claim.id], [*open_questions(claim, registry)], conflicts[claim.id])
        for claim in registry.claims
    ]


def _judgement(case: Case, model: CostModel, measured: Comparable) -> Judgement:
    found = _opinion(case, model, measured)
    differences = [*found.missing, *case.setup.assumed]
    return Judgement(case.claim, found.verdict, found.why, case.setup, differences)


def nearest_record(judgement: Judgement, measured: Comparable) -> str | None:
    """In what the closest record differs from a claim; None where records decided, or without any."""
    return None if judgement.verdict.is_by_records else measured.nearest(fields_of(judgement.setup))


def _opinion(case: Case, model: CostModel, measured: Comparable) -> Opinion:
    """By records where they say anything; what a source leaves open no record decides."""
    if case.missing:
        return Opinion(Verdict.NOT_COMPARABLE, "; ".join(map(str, case.missing)), case.missing)
    if case.left_open:
        return _as_taken(case, by_model(case.claim, case.setup, model))
    found = by_records(case.claim, case.setup, measured) or by_model(case.claim, case.setup, model)
    if found.verdict is Verdict.CONSISTENT and case.conflicts:
        others = ", ".join(f"{other.id} {number_of(other)}" for other in case.conflicts)
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
    return distance(claimed_range(one), claimed_range(other)) > 1 + tolerance
