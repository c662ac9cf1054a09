"""One pass as it is known without torch: its section of the record, its steps, its merge and its gate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

from msgspec.structs import replace

from bench.common.finite import worst
from bench.config import Cell, MeasureConfig
from bench.measure.check import Check
from bench.ranks.log import RankStage

Part = TypeVar("Part")
"""What one rank reports of a pass: mostly the section itself, with this rank alone in lists by rank."""
Found = TypeVar("Found")
Name = TypeVar("Name")
Compared = tuple[float, float]
"""An error and its limit."""
Whole = TypeVar("Whole")
"""The section of a record that the parts of all ranks make."""
NOT_RUN = "its pass did not run"
"""The reason of a check whose pass left no section and knows no better one."""
NO_OTHER_RANKS = "a replay has no data of other ranks"
"""The reason of a check that needs the numbers of other ranks."""


class Moment(IntEnum):
    """When what a gate judges happened: of several faults the first is the one to name."""

    MODEL = auto()
    """What the model is, whatever steps it takes: a fault of it shows in all that follows."""
    BEFORE_STEPS = auto()
    ANY_STEP = auto()
    INSPECTED_STEP = auto()
    PARAMETERS = auto()
    """What the steps have left behind."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank has to say once its passes are over."""

    parts: Mapping[str, Any]
    """By the pass's name, of the pass's own type; a pass that did not run has none."""
    phases_s: Mapping[str, float]
    """Seconds that each phase of the rank's life took."""
    software: Mapping[str, str] = field(default_factory=dict)
    """What only a rank knows of the software that ran, by the name in the record's `environment`."""
    flaw: str | None = None
    """First number of this rank that is not finite or breaks the rules of its section; None without one."""


class PassFacts(ABC, Generic[Part, Whole]):
    """A pass as the launcher, the estimate and the record know it; its code on a rank is in `rank.py`."""

    name: ClassVar[str]
    """The pass's name: its folder, its section in the record, its phase in a rank's log."""
    part: ClassVar[type[Any] | None]
    """The type of a rank's part; None for a pass that leaves nothing in the record."""
    is_own_work: ClassVar[bool] = True
    """Whether its seconds are the cell's own work; those of the others count as fixed cost."""
    is_evidence: ClassVar[bool] = False
    """Whether the record of a wrong result keeps this section."""
    judges: ClassVar[Moment] = Moment.ANY_STEP
    """What its gate looks at; gates are asked in that order."""
    without_effect: ClassVar[frozenset[str] | None] = None
    """Fields of a cell that do not decide its section, so that cells which differ in no other share one; None
    where every cell is measured."""
    needs_all_ranks: ClassVar[bool] = False
    """Whether it compares numbers that depend on other ranks' data, which a replay does not have."""
    max_tokens: ClassVar[int | None] = None
    """The pass uses no more of a sequence than this; None where it takes the whole."""
    workload: ClassVar[str | None] = None
    """The only workload in which its checks mean something; None where they do in each."""

    def is_asked(self, measure: MeasureConfig) -> bool:  # noqa: ARG002
        """Return whether a cell that is measured like this asks for the pass; a rank makes no other."""
        return True

    def stages(self, measure: MeasureConfig, step_s: float) -> Sequence[RankStage]:  # noqa: ARG002
        """The full-length steps that it will run, where one takes `step_s` seconds."""
        return ()

    @abstractmethod
    def merge(self, reports: Sequence[RankReport], cell: Cell) -> Whole:
        """The ranks' parts as the record's section: lists by rank, or what all ranks agree on."""

    def gate(self, cell: Cell, section: Whole) -> str | None:  # noqa: ARG002
        """Why the cell's result is wrong, in one line; None where this pass finds nothing."""
        return None

    def checks(self, cell: Cell, section: Whole | None) -> Sequence[Check]:  # noqa: ARG002
        """What this pass compared, or could not compare; None where the cell has no section of it.

        A check that has no meaning for a cell is left out; one that would have, but was not made, says why.
        """
        return ()

    def parts(self, reports: Sequence[RankReport]) -> list[Part]:
        """This pass's parts, in the order of the ranks."""
        return [report.parts[self.name] for report in reports if self.name in report.parts]


class ErrorFacts(PassFacts[Whole, Whole]):
    """A pass that compares with float64: the one gate and the one list of checks of all such passes.

    Its section has `tokens`, `errors` and `limits` by name, and a `reason` where nothing was compared.
    """

    needs_all_ranks = True
    is_evidence = True
    compares: ClassVar[tuple[str, ...]]
    """Names of its checks."""
    too_large: ClassVar[str]
    """Message about an error beyond its limit, with places for what the gate fills in."""
    not_finite: ClassVar[str]
    """Message about an error that is no finite number, with the same places."""
    labels: ClassVar[Mapping[str, str]] = {}
    """Labels of errors in these messages; a name that has none is its own."""

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> Whole:  # noqa: ARG002
        """Return the first rank's section with the largest errors and limits of any rank."""
        parts: list[Any] = self.parts(reports)
        errors, limits = (worst_by_name(by_rank(parts, name)) for name in ("errors", "limits"))
        merged: Whole = replace(parts[0], errors=errors, limits=limits)
        return merged

    def gate(self, cell: Cell, section: Any) -> str | None:
        """Return a message about the first error that is not within its limit."""
        name = first_beyond(section.errors, section.limits)
        if name is None:
            return None
        error, label = section.errors[name], self.labels.get(name, name)
        message = self.too_large if math.isfinite(error) else self.not_finite
        where = {"tokens": section.tokens, "engine": cell.engine.name}
        return message.format(name=name, label=label, error=error, limit=section.limits[name], **where)

    def checks(self, cell: Cell, section: Any) -> Sequence[Check]:
        """Return the comparisons that were made, or each with the reason why it was not."""
        if section is not None and section.reason is None and section.errors:
            return self.made(cell, section)
        reason = NOT_RUN if section is None else section.reason or NOT_RUN
        return [Check(what=what, against="float64", reason=reason) for what in self.compares]

    @abstractmethod
    def made(self, cell: Cell, section: Whole) -> Sequence[Check]:
        """Return the checks of a section whose errors were compared."""


def by_rank(parts: Sequence[Any], field: str) -> list[Any]:
    """One field of every rank's part."""
    return [getattr(part, field) for part in parts]


def of_one(value: Found | None) -> list[Found] | None:
    """A field of one rank's part: a list of one; null where the rank does not have the figure."""
    return None if value is None else [value]


def together(parts: Sequence[Any], *fields: str) -> dict[str, Any]:
    """Fields that are lists of one in every rank's part, by rank; null where a rank has none."""
    found = {field: by_rank(parts, field) for field in fields}
    return {name: None if None in each else [*chain.from_iterable(each)] for name, each in found.items()}


def by_name(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A dictionary of lists by rank, zero where a rank does not have the name."""
    names = sorted({name for values in per_rank for name in values})
    return {name: [values.get(name, 0) for values in per_rank] for name in names}


def worst_by_name(per_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The worst number of any rank by name; a rank that does not have the name has no say."""
    names = dict.fromkeys(name for each in per_rank for name in each)
    return {name: worst(each[name] for each in per_rank if name in each) for name in names}


def is_within(error: float | None, limit: float | None) -> bool:
    """Return whether an error is a finite number and no larger than its limit."""
    return error is not None and limit is not None and math.isfinite(error) and error <= limit


def first_beyond(errors: Mapping[str, float | None], limits: Mapping[str, float | None]) -> str | None:
    """Return the first name whose error is not within its limit; None where all are."""
    return next((name for name, error in errors.items() if not is_within(error, limits[name])), None)


def nearest_to_limit(compared: Mapping[Name, Compared]) -> Name:
    """Return the name whose error is beyond its limit or comes nearest to it; one that is not finite wins."""

    def nearness(name: Name) -> tuple[bool, float]:
        error, limit = compared[name]
        return not is_within(error, limit), error / (limit or 1.0) if math.isfinite(error) else math.inf

    return max(compared, key=nearness)


def errors_and_limits(compared: Mapping[str, Compared]) -> tuple[dict[str, float], dict[str, float]]:
    """Return errors and limits, each by name."""
    errors = {name: error for name, (error, _) in compared.items()}
    return errors, {name: limit for name, (_, limit) in compared.items()}
