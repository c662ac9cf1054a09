"""Run one cell and return its record, also if the cell fails."""

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
from bench.run.cell.outcome import new_record, record_of, unsupported_record, with_node_environments
from bench.run.cell.rank_watch import SILENT, Listener
from bench.run.node.job import RankEntry

SKIPPED_PASSES: Mapping[Role, frozenset[str]] = {
    Role.INJECTED_FAULT: frozenset({"parity"}),
    Role.TRAINING: frozenset({"objective"}),  # takes minutes for the many short sequences of such a cell
}
"""Passes that are skipped in cells of a role: parity would end an injected fault before its first step."""


def run(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    *,
    entry: RankEntry | None = None,
    listener: Listener = SILENT,
    shared: SharedSections | None = None,
) -> Record:
    """Run one cell and return its record. A cell that is not legal starts no ranks and is `unsupported`.

    Args:
        planned: The cell and its place in the plan.
        launcher: Starts the ranks.
        folder: Parent of the cell's folder.
        entry: Function that the ranks run; by default the passes of the cell.
        listener: Receives the progress of the ranks.
        shared: Sections of earlier cells of the sweep. Those that this cell can share are not measured again.

    Raises:
        CellInterrupted: A signal interrupted the cell.
    """
    if planned.reason is not None:
        return unsupported_record(planned, planned.reason, wall_s=0.0)
    mode = mode_of(planned.cell)
    if not mode.starts_ranks:
        return mode.complete(planned.cell, new_record(planned, Status.OK, None))
    shared = shared or SharedSections()
    record = measure(planned, launcher, folder, entry=entry, listener=listener, shared=shared)
    shared.remember(planned.cell, record)
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
    """Run the ranks of a cell, legal or not, and make its record. The arguments are those of `run`."""
    start, started_at = time.monotonic(), datetime.now(UTC)
    nodes = [node.description for node in launcher.nodes_for(planned.cell) if node.description is not None]
    shared_sections = shared.sections_for(planned.cell)
    try:
        skipped = frozenset(shared_sections) | SKIPPED_PASSES.get(planned.role, frozenset())
        if planned.cell.mode == REPLAY:
            skipped |= {name for name, section in PASSES.items() if section.needs_all_ranks}
        cell_folder = folder / planned.folder_name
        ends = launcher.run(planned.cell, cell_folder, entry=entry, listener=listener, skipped_passes=skipped)
    except KeyboardInterrupt as stop:
        wall_s = time.monotonic() - start
        reason = f"stopped by {stop.args[0] if stop.args else 'Ctrl-C'} after {wall_s:.0f} s"
        record = new_record(planned, Status.INTERRUPTED, reason, wall_s, started_at)
        raise CellInterrupted(record) from None
    record = record_of(planned, ends, time.monotonic() - start, started_at, shared_sections)
    return with_node_environments(record, nodes) if nodes else record


class CellInterrupted(KeyboardInterrupt):
    """Interruption of a cell by Ctrl-C or a signal, with the record of the interrupted cell."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


class SharedSections:
    """Sections of records, shared by all cells of a sweep with equal settings that decide the section."""

    def __init__(self) -> None:
        self._sections: dict[str, Any] = {}

    def sections_for(self, cell: Cell) -> Sections:
        """Return the sections of earlier cells that this cell can share, by the name of their pass."""
        keys = self._keys(cell)
        return {name: self._sections[key] for name, key in keys.items() if key in self._sections}

    def remember(self, cell: Cell, record: Record) -> None:
        """Store the sections of a cell, but not of a wrong result: other cells must fail by themselves."""
        if record.status is not Status.WRONG_RESULT:
            sections = {key: record.sections[name] for name, key in self._keys(cell).items()}
            self._sections |= {key: section for key, section in sections.items() if section is not None}

    def _keys(self, cell: Cell) -> dict[str, str]:
        """Return, for every pass whose section can be shared, all settings that decide the section."""
        return {
            name: f"{name} {cell.identity_without(section.ignored_fields, section.max_tokens)}"
            for name, section in PASSES.items()
            if section.ignored_fields is not None
        }
