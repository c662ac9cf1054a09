"""One cell in, one record out, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.config import Cell
from bench.measure import PASSES, Sections
from bench.plan.planned import PlannedCell
from bench.record.record import Record, Role, Status
from bench.request.modes import REPLAY, mode_of
from bench.run.cell.launcher import Launcher
from bench.run.cell.outcome import on_nodes, record_of, record_with, refused
from bench.run.cell.rank_watch import SILENT, Listener
from bench.run.node.job import RankEntry

LEFT_OUT: Mapping[Role, frozenset[str]] = {Role.INJECTED_FAULT: frozenset({"parity"})}
"""Passes that cells of a role do without: parity would end a mistake before the first of its steps."""


def run(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    *,
    entry: RankEntry | None = None,
    listener: Listener = SILENT,
    shared: SharedSections | None = None,
) -> Record:
    """The record of one cell: `unsupported` without starting anything where it is not legal.

    The cell has a folder of its own in `folder`. Ranks run `entry`, by default the cell's passes. Sections
    that are `shared` with a cell before it are not measured again.
    """
    if planned.reason is not None:
        return refused(planned, planned.reason, wall_s=0.0)
    mode = mode_of(planned.cell)
    if not mode.starts_ranks:
        return mode.complete(planned.cell, record_with(planned, Status.OK, None))
    shared = shared or SharedSections()
    record = measure(planned, launcher, folder, entry=entry, listener=listener, shared=shared)
    shared.keep(planned.cell, record)
    return mode.complete(planned.cell, record)


def measure(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    *,
    entry: RankEntry | None = None,
    listener: Listener = SILENT,
    shared: SharedSections,
) -> Record:
    """Run all ranks of the cell, legal or not, and put together what they report."""
    start, started_at = time.monotonic(), datetime.now(UTC)
    nodes = [each.description for each in launcher.nodes_for(planned.cell) if each.description is not None]
    own, known = folder / planned.folder_name, shared.of(planned.cell)
    try:
        left_out = frozenset(known) | LEFT_OUT.get(planned.role, frozenset())
        if planned.cell.mode == REPLAY:
            left_out |= {name for name, section in PASSES.items() if section.needs_all_ranks}
        ends = launcher.run(planned.cell, own, entry=entry, listener=listener, known=left_out)
    except KeyboardInterrupt as stop:
        wall_s = time.monotonic() - start
        reason = f"stopped by {stop.args[0] if stop.args else 'Ctrl-C'} after {wall_s:.0f} s"
        record = record_with(planned, Status.INTERRUPTED, reason, wall_s, started_at)
        raise CellInterrupted(record) from None
    record = record_of(planned, ends, time.monotonic() - start, started_at, known)
    return on_nodes(record, nodes) if nodes else record


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C or a signal during a cell; carries the record that says so."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


class SharedSections:
    """Results that cells of a sweep share: sections that one cell found."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def of(self, cell: Cell) -> Sections:
        """What is known of a cell before it runs, by the name of the pass."""
        keys = self._keys(cell)
        return {name: self._found[key] for name, key in keys.items() if key in self._found}

    def keep(self, cell: Cell, record: Record) -> None:
        """Remember what was found; what failed is measured again, to fail again by itself."""
        if record.status is not Status.WRONG_RESULT:
            found = {key: record.sections[name] for name, key in self._keys(cell).items()}
            self._found |= {key: section for key, section in found.items() if section is not None}

    def _keys(self, cell: Cell) -> dict[str, str]:
        """Per pass whose section is shared all that decides it."""
        return {
            name: f"{name} {cell.identity_without(section.without_effect, section.max_tokens)}"
            for name, section in PASSES.items()
            if section.without_effect is not None
        }
