"""What was checked of loops that were observed, and what nobody looked at, in sentences."""

from __future__ import annotations

from analysis.cells.cells import Cells
from bench.common.labels import length_label
from bench.record.record import Status

MAX_TOLD = 4
"""Different sets of checks that are told; the table of checks on each record's page has all."""


def observed_lines(cells: Cells) -> list[str]:
    """`Of ring at 8k checked: tokens; not checked: objective (why).`, of each observed loop that is ok."""
    rows = cells.frame[cells.are_observed & cells.frame["status"].eq(Status.OK)]
    found: dict[str, list[str]] = {}
    for row, seq_len, checks in rows[["seq_len", "checks_told"]].dropna().itertuples():
        found.setdefault(checks, []).append(f"{cells.names[row]} at {length_label(int(seq_len))}")
    lines = [f"Of {', '.join(names)} {checks}." for checks, names in found.items()]
    if len(lines) > MAX_TOLD:
        lines = [*lines[:MAX_TOLD], f"{len(lines) - MAX_TOLD:,} more loops were checked otherwise."]
    return lines
