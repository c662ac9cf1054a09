"""One cell in, one record out, whatever happens in between."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cell.launcher import SILENT, Launcher, Listener
from bench.cell.outcome import _record, record_of, refused
from bench.cell.planned import PlannedCell
from bench.record import Parity, Record, Status
from bench.request.legality import refusal

if TYPE_CHECKING:
    from bench.cell.worker import RankEntry


def run(
    planned: PlannedCell,
    launcher: Launcher,
    folder: Path,
    *,
    entry: RankEntry | None = None,
    listener: Listener = SILENT,
    known_parity: Parity | None = None,
) -> Record:
    """The record of one cell: `unsupported` without starting a rank where it is not legal.

    With `known_parity`, that of an equal cell, the check is not run again.
    """
    reason = refusal(planned.cell)
    if reason is not None:
        return refused(planned, reason, wall_s=0.0)
    start = time.monotonic()
    started_at = datetime.now(UTC)
    try:
        ends = launcher.run(
            planned.cell,
            folder / planned.folder_name,
            entry=entry,
            listener=listener,
            parity_is_known=known_parity is not None,
        )
    except KeyboardInterrupt:
        wall_s = time.monotonic() - start
        reason = f"stopped by Ctrl-C after {wall_s:.0f} s"
        interrupted = _record(planned, Status.INTERRUPTED, reason, wall_s, started_at)
        raise CellInterrupted(interrupted) from None
    return record_of(planned, ends, time.monotonic() - start, started_at, known_parity)


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C during a cell; carries the record that says so."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
