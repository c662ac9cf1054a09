"""Table of the passes that check and measure a cell on its ranks. May import cost and all below.

A pass measures or checks one thing, such as `timing` or `parity`. Each rank reports its part of the result,
and the launcher merges the parts of all ranks into one section of the record. A gate is the function of a
pass that turns a failed check into a wrong result.

A new pass is a folder here and a line in `PASS_NAMES`. Processes that must not import torch read the
`section.py` of a folder; the ranks run its `rank.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from bench.common.finite import find_not_finite
from bench.config import Cell, MeasureConfig
from bench.measure.check import Check
from bench.measure.facts import NO_OTHER_RANKS, PassFacts, RankReport
from bench.ranks.log import RankStage

if TYPE_CHECKING:
    from bench.measure.rank_pass import RankPass

Sections = Mapping[str, Any]
"""Sections of a record by the name of their pass. The section of a pass that did not run is None."""

PASS_NAMES = (
    "updates",
    "quality",
    "objective",
    "weights",
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
"""Names of all passes, in the order in which they request steps."""

PASSES: Mapping[str, PassFacts[Any, Any]] = {
    name: importlib.import_module(f"bench.measure.{name}.section").FACTS for name in PASS_NAMES
}


def load_pass_class(name: str) -> type[RankPass]:
    """Return the class in the `rank.py` of a pass, which is imported only in rank processes."""
    code: type[RankPass] = importlib.import_module(f"bench.measure.{name}.rank").PASS
    return code


def decode_reports(reports: Sequence[Mapping[str, Any]]) -> list[RankReport]:
    """Return the reports of all ranks, converted from their JSON values.

    If one rank's part of a pass breaks the rules of its type, the parts of this pass are dropped from the
    reports of all ranks. The `flaw` of that rank then says which rule is broken.
    """
    all_parts = [
        {name: _decode_part(report, name) for name in PASSES if name in report} for report in reports
    ]
    invalid = {name for parts in all_parts for name, part in parts.items() if isinstance(part, str)}
    return [
        RankReport(
            {name: part for name, part in parts.items() if name not in invalid},
            report["phases_s"],
            report.get("software", {}),
            _why_not_finite(report) or next((part for part in parts.values() if isinstance(part, str)), None),
        )
        for report, parts in zip(reports, all_parts, strict=True)
    ]


def _decode_part(report: Mapping[str, Any], name: str) -> Any:
    """Return the part of a pass in a rank's report, or a message (str) about the rule that it breaks."""
    try:
        return msgspec.convert(report[name], PASSES[name].part_type)
    except msgspec.ValidationError as error:
        return f"{name}: {error}"


def _why_not_finite(report: Mapping[str, Any]) -> str | None:
    """Return a message about the first number in a rank's report that is not finite; None without one."""
    places = (place for name in PASSES if name in report for place in find_not_finite(report[name], name))
    return next((f"{place}, which is no finite number" for place in places), None)


def merge_reports(
    reports: Sequence[RankReport], cell: Cell, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sections of a cell's record, merged from the reports of its ranks.

    The section of a pass that no rank reports is None. `known` are sections that were taken from the record
    of another cell, because they do not depend on the settings in which the two cells differ.
    """
    merged = {
        name: facts.merge(reports, cell) if facts.parts(reports) else None
        for name, facts in PASSES.items()
        if facts.part_type is not None
    }
    return merged | {name: section for name, section in (known or {}).items() if name in merged}


def first_failure(cell: Cell, sections: Sections) -> str | None:
    """Return one line that says why the result of the cell is wrong; None if every gate passes."""
    filled = {name: section for name, section in sections.items() if section is not None}
    in_gate_order = sorted(filled, key=lambda name: PASSES[name].fault_origin)
    reasons = (PASSES[name].gate(cell, filled[name]) for name in in_gate_order)
    return next((reason for reason in reasons if reason is not None), None)


def checks(cell: Cell, sections: Sections) -> list[Check]:
    """Return the checks of all passes in the order of `PASS_NAMES`, including those that were not made."""
    return [
        check if cell.replay.rank is None else _replay_check(check, facts, cell)
        for name, facts in PASSES.items()
        if facts.workload in (None, cell.workload.name)
        for check in facts.checks(cell, sections.get(name))
    ]


def _replay_check(check: Check, facts: PassFacts[Any, Any], cell: Cell) -> Check:
    """Return the check with the tokens of the replayed rank, or the reason if a replay cannot make it."""
    tokens = None if check.tokens is None else min(check.tokens, cell.shard_len)
    return replace(check, tokens=tokens, reason=NO_OTHER_RANKS if facts.needs_all_ranks else check.reason)


def evidence_sections(sections: Sections) -> dict[str, Any]:
    """Return the sections that the record of a wrong result keeps. Sections with speeds are left out."""
    return {name: section for name, section in sections.items() if PASSES[name].is_evidence}


def planned_stages(measure: MeasureConfig, step_s: float) -> list[RankStage]:
    """Return the stages of the requested passes in order, if one full-length step takes `step_s` seconds."""
    requested = (facts for facts in PASSES.values() if facts.is_requested(measure))
    return [stage for facts in requested for stage in facts.stages(measure, step_s)]


def own_work_s(report: RankReport) -> float:
    """Return the seconds that a rank spent in passes whose time is work of the cell (`is_own_work`)."""
    return sum(report.phases_s.get(name, 0.0) for name, facts in PASSES.items() if facts.is_own_work)
