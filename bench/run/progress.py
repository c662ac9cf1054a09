"""Show the progress of a running sweep: a bar in a terminal, plain lines in a log.

A terminal shows the running cell with its pass and step, and the time left. A log has a line for every
finished cell, and a line a minute while a cell takes long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import progress as bars
from rich.console import Console, RenderableType
from rich.text import Text

from bench.common.labels import duration_label
from bench.config import Cell
from bench.plan.cell_labels import CellLabels, short_label
from bench.plan.estimate import LATE_S, CellProgress, Estimate
from bench.plan.planned import PlannedCell
from bench.ranks.log import RankStage
from bench.record.record import RESULT_STATUSES, Record
from bench.request.modes import starts_ranks
from bench.run.cell.outcome import outcome
from bench.run.cell.rank_watch import Listener

HEARTBEAT_S = 60.0
"""Seconds without a line after which a log gets one while a cell runs."""


class Progress(Listener):
    """Shows one sweep on one console."""

    def __init__(
        self,
        console: Console,
        now_s: Callable[[], float] = time.monotonic,
        estimate: Estimate | None = None,
    ) -> None:
        """Create the display without showing it.

        `estimate` gives the duration of steps before any step has run.
        """
        self.console = console
        self._now_s = now_s
        self._estimate = estimate or Estimate()
        self._labels = CellLabels()
        self._remaining: list[PlannedCell] = []
        self._running: PlannedCell | None = None
        self._cell_progress: CellProgress | None = None
        self._is_reference = False
        self._has_started = False
        self._later_cells_s: float | None = None
        """Estimated seconds of all cells after the running one; None if unknown."""
        self._total = 0
        self._folder = Path()
        self._printed_at_s = now_s()
        # The bar has no thread, as ranks need every core; the launcher calls `on_tick` instead.
        self._bar = _Bar(
            bars.BarColumn(),
            "{task.completed}/{task.total} cells",
            bars.TimeElapsedColumn(),
            "{task.fields[left]}",
            console=console,
            auto_refresh=False,
            transient=True,
            get_time=now_s,
            # With FORCE_COLOR rich treats a pipe as a terminal, but a pipe must not get cursor movements.
            disable=not (console.is_interactive and console.file.isatty()),
        )
        self._sweep = self._bar.add_task("", start=False, left="")

    def start(self, cells: Sequence[PlannedCell], folder: Path, notes: Iterable[str] = ()) -> None:
        """Print the number of cells that will run, their placement and the notes, and show the bar."""
        self._remaining, self._total, self._folder = list(cells), len(cells), folder
        self._labels = CellLabels(planned.cell for planned in cells)
        if not cells:
            self.print_line(f"nothing is missing in {folder}; to run all cells again, name another sweep_dir")
            for note in notes:
                self.print_line(note)
            return
        self.print_line(f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}, records go to {folder}")
        for line in sorted({_placement_line(planned.cell) for planned in cells}):
            self.print_line(line)
        for note in notes:
            self.print_line(note)
        self._bar.start_task(self._sweep)
        self._refresh()
        self._bar.start()

    def add(self, cells: Sequence[PlannedCell], note: str | None) -> None:
        """Add cells to the plan that is shown, and print the note."""
        self._remaining.extend(cells)
        self._total += len(cells)
        self._labels.add(planned.cell for planned in cells)
        if note is not None:
            self.print_line(note)

    def begin(self, planned: PlannedCell, *, is_reference: bool = False) -> None:
        """Show a cell that is about to run: a cell of the sweep, or with `is_reference` a reference."""
        self._running, self._is_reference = planned, is_reference
        imports = starts_ranks(planned.cell) and not self._has_started
        step_s = None if planned.reason is not None else self._estimate.step_s(planned.cell)
        self._cell_progress = CellProgress(planned.cell, step_s, self._now_s, imports=imports)
        self._printed_at_s = self._now_s()
        self._estimate_later_cells()
        self._refresh()

    @contextmanager
    def show_reference(self, planned: PlannedCell) -> Iterator[Listener]:
        """Show a reference, which is no cell of the sweep, while it runs."""
        self.begin(planned, is_reference=True)
        try:
            yield self
        finally:
            self._running = self._cell_progress = None

    def on_stage(self, stage: RankStage) -> None:
        """Record the stage of the running cell; the next tick shows it."""
        assert self._running is not None
        assert self._cell_progress is not None
        self._has_started = True
        self._cell_progress.enter(stage)
        # A reference has another number of threads, so its steps say nothing about the steps of the sweep.
        if stage.step_s is not None and not self._is_reference:
            self._estimate.learn(self._running.cell, stage.step_s)
            self._estimate_later_cells()

    def on_tick(self) -> None:
        """Update the bar. In a log, print a line if there was none for HEARTBEAT_S."""
        self._refresh()
        if self._bar.disable and self._now_s() - self._printed_at_s >= HEARTBEAT_S and self._cell_progress:
            elapsed = duration_label(self._cell_progress.elapsed_s)
            self.print_line(
                f"{self._place()}: running for {elapsed}, {self._cell_progress.stage_label()}; {self._eta()}"
            )

    def remove(self, planned: PlannedCell) -> None:
        """Remove a cell that will not run from the number of cells."""
        self._remaining.remove(planned)
        self._total -= 1

    def end(self, planned: PlannedCell, record: Record) -> None:
        """Print the result of the running cell, and the path of its log if it failed."""
        assert self._cell_progress is not None
        line = f"{self._place()}: {outcome(record)} ({self._cell_progress.elapsed_s:.1f} s)"
        self._remaining.remove(planned)
        self._running = self._cell_progress = None
        timing = record.timing
        if timing is not None:
            self._estimate.learn(planned.cell, max(map(statistics.median, timing.step_times_ms)) / 1e3)
        self._estimate_later_cells()
        if record.status not in RESULT_STATUSES and record.failure is not None:
            log = self._folder / "cells" / planned.folder_name / f"rank_{record.failure.rank}.log"
            line = f"{line}; log: {log}" if log.exists() else line
        self.print_line(
            f"{line}; {self._eta()}" if self._remaining and self._later_cells_s is not None else line
        )
        self._refresh()

    @contextmanager
    def without_bar(self) -> Iterator[None]:
        """Hide the bar in this context, so that other output can be printed."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()

    def print_line(self, line: str) -> None:
        """Print one line; never wrapped, so that a path or a command can be copied."""
        self._printed_at_s = self._now_s()
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _refresh(self) -> None:
        if self._bar.disable:
            return
        done = self._total - len(self._remaining)
        running = (
            "" if self._cell_progress is None else f"{self._label()}: {self._cell_progress.stage_label()}"
        )
        self._bar.update(
            self._sweep, total=self._total, completed=done, description=running, left=self._eta()
        )
        self._bar.refresh()

    def _label(self) -> str:
        if self._running is None:
            return ""
        if self._is_reference:
            return f"{short_label(self._running.cell)} as a reference"
        return self._labels.label(self._running.cell)

    def _place(self) -> str:
        """Return text such as `[2/6] ring 64k sp 2`: the running cell and its number in this run."""
        if self._is_reference:
            return self._label()
        return f"[{self._total - len(self._remaining) + 1}/{self._total}] {self._label()}"

    def _eta(self) -> str:
        """Return text such as `about 5 min left`, or `at least 5 min left, this cell is 30 s late`.

        The text is empty if no cell remains.
        """
        if not self._remaining:
            return ""
        left_s: float | None = 0.0
        if self._running is not None and self._cell_progress is not None:
            starts_ranks = self._estimate.cell_s(self._running) != 0.0
            left_s = self._cell_progress.left_s if starts_ranks else 0.0
        if self._later_cells_s is None or left_s is None:
            return "time left unknown"
        left = f"{duration_label(self._later_cells_s + max(0.0, left_s))} left"
        return (
            f"about {left}"
            if left_s > -LATE_S
            else f"at least {left}, this cell is {duration_label(-left_s)} late"
        )

    def _estimate_later_cells(self) -> None:
        """Estimate the seconds of the cells after the running one.

        This is not done at every tick, as there may be thousands of cells.
        """
        later = (planned for planned in self._remaining if planned is not self._running)
        self._later_cells_s = self._estimate.remaining_s(later)


class _Bar(bars.Progress):
    """Progress bar of two lines: the state of the running cell, and the progress of the sweep."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (Text(task.description, no_wrap=True, overflow="ellipsis") for task in self.tasks)
        yield from super().get_renderables()


def _placement_line(cell: Cell) -> str:
    """Return text such as `ring: 2 x cpu over gloo, 1 thread each, qwen3_nano, zero3, bf16`."""
    cluster = cell.cluster
    rank = "" if cell.replay.rank is None else f"rank {cell.replay.rank} of "
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    shared = ", ranks share GPUs: correctness only" if cluster.ranks_per_gpu > 1 else ""
    threads = "1 thread" if cluster.threads_per_rank == 1 else f"{cluster.threads_per_rank} threads"
    return (
        f"{cell.strategy}: {rank}{cluster.world_size} x {cluster.device}{nodes} over {cluster.backend}"
        f"{shared}, {threads} each, {cell.model.name}, {cell.engine.name}, {cell.dtype}"
    )
