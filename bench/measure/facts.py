"""Base class of a pass's facts: its section of the record, its steps, its merge and its gate. No torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

from msgspec.structs import replace

from bench.common.finite import largest_error
from bench.config import Cell, MeasureConfig
from bench.measure.check import Check
from bench.ranks.log import RankStage

PartT = TypeVar("PartT")
"""Part of a section that one rank reports, mostly a section whose lists by rank have one entry."""
SectionT = TypeVar("SectionT")
"""Section of a record, merged from the parts of all ranks."""
ValueT = TypeVar("ValueT")
KeyT = TypeVar("KeyT")
ErrorAndLimit = tuple[float, float]
"""Error and its limit."""
NOT_RUN = "its pass did not run"
"""Reason of a missing check if the pass has no section, or its section gives no reason."""
NO_OTHER_RANKS = "a replay has no data of other ranks"
"""Reason of a missing check that needs the numbers of other ranks."""


class FaultOrigin(IntEnum):
    """Origin of the faults that a pass's gate finds, in order of time.

    Gates run in this order, so that a record names the earliest of several faults.
    """

    MODEL = auto()
    """The model itself; its faults show in everything that follows."""
    BEFORE_STEPS = auto()
    ANY_STEP = auto()
    INSPECTED_STEP = auto()
    PARAMETERS = auto()
    """The parameters after the last step."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Results of one rank after its last pass."""

    parts: Mapping[str, Any]
    """Part of each pass that ran, by the name of the pass."""
    phases_s: Mapping[str, float]
    """Seconds that each phase of the rank's life took."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Entries of the record's `environment` that only a rank can know."""
    flaw: str | None = None
    """Message about the first number that is not finite, or about a part that breaks a rule of its type."""


class PassFacts(ABC, Generic[PartT, SectionT]):
    """Facts of one pass for the launcher, the estimate and the record; its `rank.py` runs on the ranks."""

    name: ClassVar[str]
    """Name of the pass: its folder, its section of the record, and its phase in a rank's log."""
    part_type: ClassVar[type[Any] | None]
    """Type of a rank's part; None for a pass that adds nothing to the record."""
    is_own_work: ClassVar[bool] = True
    """True if the seconds of this pass are work of the cell, False if they are a fixed cost."""
    is_evidence: ClassVar[bool] = False
    """True if the record of a wrong result keeps the section of this pass."""
    fault_origin: ClassVar[FaultOrigin] = FaultOrigin.ANY_STEP
    """Origin of the faults that the gate finds; it decides the order of the gates."""
    ignored_fields: ClassVar[frozenset[str] | None] = None
    """Fields of a cell on which the section does not depend. Cells that differ only in these fields share one
    section. None if the pass runs in every cell."""
    needs_all_ranks: ClassVar[bool] = False
    """True if the checks need data of other ranks, which a replay of one rank does not have."""
    max_tokens: ClassVar[int | None] = None
    """Largest number of tokens of a sequence that the pass uses; None if it uses all of them."""
    workload: ClassVar[str | None] = None
    """Only workload for which the pass has checks; None if it has them for all workloads."""

    def is_requested(self, measure: MeasureConfig) -> bool:  # noqa: ARG002
        """Return whether these settings ask for the pass; ranks run no other passes."""
        return True

    def stages(self, measure: MeasureConfig, step_s: float) -> Sequence[RankStage]:  # noqa: ARG002
        """Return the stages of full-length steps that the pass will run, for the estimate of a cell's time.

        Args:
            measure: Settings of the measurement.
            step_s: Expected seconds of one step.
        """
        return ()

    @abstractmethod
    def merge(self, reports: Sequence[RankReport], cell: Cell) -> SectionT:
        """Return the section of the record, made of the parts of all ranks.

        Args:
            reports: Reports in the order of the ranks; at least one of them has a part of this pass.
            cell: The cell that ran.

        Returns:
            A section with lists by rank, or with the values on which all ranks agree.
        """

    def gate(self, cell: Cell, section: SectionT) -> str | None:  # noqa: ARG002
        """Return one line that says why the result of the cell is wrong; None if the pass finds no fault."""
        return None

    def checks(self, cell: Cell, section: SectionT | None) -> Sequence[Check]:  # noqa: ARG002
        """Return the comparisons of this pass, made or not.

        Args:
            cell: The cell that ran.
            section: Section of this pass; None if the pass did not run.

        Returns:
            Checks that mean something for the cell. A check that was not made has a `reason`.
        """
        return ()

    def parts(self, reports: Sequence[RankReport]) -> list[PartT]:
        """Return the parts of this pass in the order of the ranks, without the ranks that have none."""
        return [report.parts[self.name] for report in reports if self.name in report.parts]


class ErrorFacts(PassFacts[SectionT, SectionT]):
    """Facts of a pass that compares results with float64, with the gate and the checks of all such passes.

    A section of such a pass has `tokens`, `errors` by name, `limits` by name, and a `reason` if nothing was
    compared.
    """

    needs_all_ranks = True
    is_evidence = True
    check_names: ClassVar[tuple[str, ...]]
    """Names of the checks of this pass."""
    too_large: ClassVar[str]
    """Message about an error beyond its limit: a format string for `name`, `label`, `error`, `limit`,
    `tokens` and `engine`."""
    not_finite: ClassVar[str]
    """Message about an error that is no finite number, with the same fields as `too_large`."""
    labels: ClassVar[Mapping[str, str]] = {}
    """Labels of errors in messages, by name; without an entry the name is the label."""

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> SectionT:  # noqa: ARG002
        """Return the first rank's section, with each error and limit replaced by the largest of all ranks."""
        parts: list[Any] = self.parts(reports)
        errors, limits = (worst_by_name(field_by_rank(parts, name)) for name in ("errors", "limits"))
        merged: SectionT = replace(parts[0], errors=errors, limits=limits)
        return merged

    def gate(self, cell: Cell, section: Any) -> str | None:
        """Return a message about the first error that is not within its limit; None if all errors are."""
        name = first_beyond(section.errors, section.limits)
        if name is None:
            return None
        error, label = section.errors[name], self.labels.get(name, name)
        message = self.too_large if math.isfinite(error) else self.not_finite
        fields = {"tokens": section.tokens, "engine": cell.engine.name}
        return message.format(name=name, label=label, error=error, limit=section.limits[name], **fields)

    def checks(self, cell: Cell, section: Any) -> Sequence[Check]:
        """Return the checks against float64. If nothing was compared, each check has the reason."""
        if section is not None and section.reason is None and section.errors:
            return self.error_checks(cell, section)
        reason = NOT_RUN if section is None else section.reason or NOT_RUN
        return [Check(what=name, against="float64", reason=reason) for name in self.check_names]

    @abstractmethod
    def error_checks(self, cell: Cell, section: SectionT) -> Sequence[Check]:
        """Return the checks of a section whose errors were compared.

        Args:
            cell: The cell that ran.
            section: Section that has errors and no `reason`.
        """


def field_by_rank(parts: Sequence[Any], field: str) -> list[Any]:
    """Return the values of one field as a list with an entry for each part."""
    return [getattr(part, field) for part in parts]


def one_rank_list(value: ValueT | None) -> list[ValueT] | None:
    """Return a value as the list by rank of one rank; None if the rank has no value."""
    return None if value is None else [value]


def join_by_rank(parts: Sequence[Any], *fields: str) -> dict[str, Any]:
    """Return fields as lists by rank, joined from parts that have a list of one entry for each field.

    The list of a field is None if any rank has None.
    """
    lists = {field: field_by_rank(parts, field) for field in fields}
    return {
        name: None if None in values else [*chain.from_iterable(values)] for name, values in lists.items()
    }


def lists_by_name(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return a list for each name with the values of all ranks; 0 for a rank that does not have the name."""
    names = sorted({name for values in per_rank for name in values})
    return {name: [values.get(name, 0) for values in per_rank] for name in names}


def worst_by_name(per_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name over the ranks that have it; not finite counts as largest."""
    names = dict.fromkeys(name for values in per_rank for name in values)
    return {name: largest_error(values[name] for values in per_rank if name in values) for name in names}


def is_within(error: float | None, limit: float | None) -> bool:
    """Return whether an error is a finite number and no larger than its limit."""
    return error is not None and limit is not None and math.isfinite(error) and error <= limit


def first_beyond(errors: Mapping[str, float | None], limits: Mapping[str, float | None]) -> str | None:
    """Return the first name whose error is not within its limit; None if every error is."""
    return next((name for name, error in errors.items() if not is_within(error, limits[name])), None)


def nearest_to_limit(compared: Mapping[KeyT, ErrorAndLimit]) -> KeyT:
    """Return the name whose error is the largest share of its limit.

    An error beyond its limit is preferred to errors within their limits, and an error that is not finite to
    all others.
    """

    def nearness(name: KeyT) -> tuple[bool, float]:
        error, limit = compared[name]
        return not is_within(error, limit), error / (limit or 1.0) if math.isfinite(error) else math.inf

    return max(compared, key=nearness)


def errors_and_limits(compared: Mapping[str, ErrorAndLimit]) -> tuple[dict[str, float], dict[str, float]]:
    """Return a dictionary of the errors and one of the limits."""
    errors = {name: error for name, (error, _) in compared.items()}
    return errors, {name: limit for name, (_, limit) in compared.items()}
