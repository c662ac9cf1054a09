"""A cell is checked and measured on its ranks, pass by pass. May import cost and all below.

The one table of passes: a new one is a folder here and a line below. `section.py` in the folder is read by
processes that must not import torch; `rank.py` runs on the ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from bench.common.finite import not_finite
from bench.config import Cell, MeasureConfig
from bench.measure.check import Check
from bench.measure.facts import NO_OTHER_RANKS, PassFacts, RankReport
from bench.ranks.log import RankStage

if TYPE_CHECKING:
    from bench.measure.rank_pass import RankPass

Sections = Mapping[str, Any]
"""A record's sections by the names of their passes, None where a pass did not run."""

NAMES = (
    "updates",
    "probe",
    "objective",
    "gradients",
    "timing",
    "parity",
    "losses",
    "documents",
    "attention",
    "memory",
    "telemetry",
    "engagement",
    "positions",
    "trace",
    "full_length",
)
"""In the order in which passes take their turns with steps."""

PASSES: Mapping[str, PassFacts[Any, Any]] = {
    name: importlib.import_module(f"bench.measure.{name}.section").FACTS for name in NAMES
}


def rank_code(name: str) -> type[RankPass]:
    """A pass's code, `rank.py` beside its `section.py`, imported only where ranks run."""
    code: type[RankPass] = importlib.import_module(f"bench.measure.{name}.rank").PASS
    return code


def decoded(reports: Sequence[Mapping[str, Any]]) -> list[RankReport]:
    """Return the reports of all ranks from their JSON values.

    A pass of which any rank's part breaks the rules of its type has no part on any rank; that rank's
    `flaw` says where.
    """
    found = [{name: _decoded(report, name) for name in PASSES if name in report} for report in reports]
    broken = {name for parts in found for name, part in parts.items() if isinstance(part, str)}
    return [
        RankReport(
            {name: part for name, part in parts.items() if name not in broken},
            report["phases_s"],
            report.get("software", {}),
            _flaw(report) or next((part for part in parts.values() if isinstance(part, str)), None),
        )
        for report, parts in zip(reports, found, strict=True)
    ]


def _decoded(report: Mapping[str, Any], name: str) -> Any:
    """Return a rank's part of a pass, or as a text which rule it breaks."""
    try:
        return msgspec.convert(report[name], PASSES[name].part)
    except msgspec.ValidationError as error:
        return f"{name}: {error}"


def _flaw(report: Mapping[str, Any]) -> str | None:
    """Return where in a rank's parts the first number is not finite."""
    places = (place for name in PASSES if name in report for place in not_finite(report[name], name))
    return next((f"{place}, which is no finite number" for place in places), None)


def merge(
    reports: Sequence[RankReport], cell: Cell, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The record's sections; those that are `known` from an equal cell stand for what was not run again."""
    merged = {
        name: facts.merge(reports, cell) if facts.parts(reports) else None
        for name, facts in PASSES.items()
        if facts.part is not None
    }
    return merged | {name: section for name, section in (known or {}).items() if name in merged}


def first_failure(cell: Cell, sections: Sections) -> str | None:
    """Why the cell's result is wrong, in one line, or None when every gate is passed."""
    made = {name: section for name, section in sections.items() if section is not None}
    in_time = sorted(made, key=lambda name: PASSES[name].judges)
    reasons = (PASSES[name].gate(cell, made[name]) for name in in_time)
    return next((reason for reason in reasons if reason is not None), None)


def checks(cell: Cell, sections: Sections) -> list[Check]:
    """What all passes compared and what they could not, in the order of the table."""
    return [
        check if cell.replay.rank is None else _of_one_rank(check, facts, cell)
        for name, facts in PASSES.items()
        if facts.workload in (None, cell.workload.name)
        for check in facts.checks(cell, sections.get(name))
    ]


def _of_one_rank(check: Check, facts: PassFacts[Any, Any], cell: Cell) -> Check:
    """The check as a replay makes it: of the tokens of one rank, or not at all."""
    tokens = None if check.tokens is None else min(check.tokens, cell.shard_len)
    return replace(check, tokens=tokens, reason=NO_OTHER_RANKS if facts.needs_all_ranks else check.reason)


def evidence(sections: Sections) -> dict[str, Any]:
    """The sections that the record of a wrong result keeps: none of them holds a speed."""
    return {name: section for name, section in sections.items() if PASSES[name].is_evidence}


def planned_stages(measure: MeasureConfig, step_s: float) -> list[RankStage]:
    """The stages with full-length steps, in order, where a step takes `step_s` seconds."""
    asked = (facts for facts in PASSES.values() if facts.is_asked(measure))
    return [stage for facts in asked for stage in facts.stages(measure, step_s)]


def own_work_s(report: RankReport) -> float:
    """Seconds that a rank spent on the cell's own steps and checks."""
    return sum(report.phases_s.get(name, 0.0) for name, facts in PASSES.items() if facts.is_own_work)
