"""One cell in, one record out, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cell.launcher import SILENT, Launcher, Listener
from bench.cell.outcome import interrupted, record_of, refused
from bench.cell.planned import PlannedCell
from bench.passes import Sections
from bench.record import Record
from bench.request.legality import refusal

if TYPE_CHECKING:
    from bench.cell.worker import RankEntry


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C during a cell; carries the record that says so."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def run(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    *,
    entry: RankEntry | None = None,
    listener: Listener = SILENT,
    known: Sections | None = None,
) -> Record:
    """The record of one cell: `unsupported` without starting anything where it is not legal.

    The cell has a folder of its own in `folder`. Ranks run `entry`, by default the cell's passes. Sections in
    `known`, those of an equal cell, are not measured again.
    """
    reason = refusal(planned.cell)
    if reason is not None:
        return refused(planned, reason, wall_s=0.0)
    start, started_at = time.monotonic(), datetime.now(UTC)
    try:
        return MODES[planned.cell.mode](planned, launcher, folder, entry, listener, known or {})
    except KeyboardInterrupt:
        record = interrupted(planned, time.monotonic() - start, started_at)
        raise CellInterrupted(record) from None


def measure(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    entry: RankEntry | None,
    listener: Listener,
    known: Sections,
) -> Record:
    """Run all ranks of the cell, and put together what they report."""
    start, started_at = time.monotonic(), datetime.now(UTC)
    ends = launcher.run(
        planned.cell,
        folder / planned.folder_name,
        entry=entry,
        listener=listener,
        known=frozenset(known),
    )
    return record_of(planned, ends, time.monotonic() - start, started_at, known)


MODES: Mapping[str, Callable[..., Record]] = {"measure": measure}
"""How a cell becomes a record, by its mode."""
