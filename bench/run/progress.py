"""What a person sees while a sweep runs: a bar in a terminal, plain lines in a log.

A terminal shows the running cell's pass and step and counts the time left down. A log has a line for every
finished cell and, while one takes long, a line a minute.
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
from bench.record.record import FINDINGS, Record
from bench.request.modes import starts_ranks
from bench.run.cell.outcome import outcome
from bench.run.cell.rank_watch import Listener

HEARTBEAT_S = 60.0
"""How long a log may stay silent while a cell runs."""


class Progress(Listener):
    """Follows one sweep on one console; `now_s` is a clock, `estimate` what is known of its steps before."""

    def __init__(
        self,
        console: Console,
        now_s: Callable[[], float] = time.monotonic,
        estimate: Estimate | None = None,
    ) -> None:
        self.console = console
        self._now_s = now_s
        self._estimate = estimate or Estimate()
        self._labels = CellLabels()
        self._left: list[PlannedCell] = []
        self._running: PlannedCell | None = None
        self._cell_progress: CellProgress | None = None
        self._is_reference = False
        self._has_started = False
        self._waiting_s: float | None = None
        self._total = 0
        self._folder = Path()
        self._said_s = now_s()
        # No thread of its own: the launcher ticks, and ranks need every core.
        self._bar = _Bar(
            bars.BarColumn(),
            "{task.completed}/{task.total} cells",
            bars.TimeElapsedColumn(),
            "{task.fields[left]}",
            console=console,
            auto_refresh=False,
            transient=True,
            get_time=now_s,
            # FORCE_COLOR makes rich take a pipe for a terminal: colours it may have, but no moving cursor.
            disable=not (console.is_interactive and console.file.isatty()),
        )
        self._sweep = self._bar.add_task("", start=False, left="")

    def start(self, cells: Sequence[PlannedCell], folder: Path, notes: Iterable[str] = ()) -> None:
        """Say what is planned and on what, and the plan's own notes."""
        self._left, self._total, self._folder = list(cells), len(cells), folder
        self._labels = CellLabels(planned.cell for planned in cells)
        if not cells:
            self.say(f"nothing is missing in {folder}; name another sweep_dir to run all again")
            for note in notes:
                self.say(note)
            return
        self.say(f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}, records in {folder}")
        for line in sorted({_placed_line(planned.cell) for planned in cells}):
            self.say(line)
        for note in notes:
            self.say(note)
        self._bar.start_task(self._sweep)
        self._refresh()
        self._bar.start()

    def add(self, cells: Sequence[PlannedCell], note: str | None) -> None:
        """Say what is planned beyond what was said at the start."""
        self._left.extend(cells)
        self._total += len(cells)
        self._labels.add(planned.cell for planned in cells)
        if note is not None:
            self.say(note)

    def begin(self, planned: PlannedCell, *, is_reference: bool = False) -> None:
        """Follow a cell that is about to run; `is_reference` for one that is none of the sweep's."""
        self._running, self._is_reference = planned, is_reference
        imports = starts_ranks(planned.cell) and not self._has_started
        step_s = None if planned.reason is not None else self._estimate.step_s(planned.cell)
        self._cell_progress = CellProgress(planned.cell, step_s, self._now_s, imports=imports)
        self._said_s = self._now_s()
        self._guess()
        self._refresh()

    @contextmanager
    def show_reference(self, planned: PlannedCell) -> Iterator[Listener]:
        """Show a reference, which is none of the sweep's cells, as long as it runs."""
        self.begin(planned, is_reference=True)
        try:
            yield self
        finally:
            self._running = self._cell_progress = None

    def tell(self, stage: RankStage) -> None:
        """What the running cell does from now on; the next tick shows it."""
        assert self._running is not None
        assert self._cell_progress is not None
        self._has_started = True
        self._cell_progress.enter(stage)
        # A reference runs on other threads, so it says nothing about the sweep's own steps.
        if stage.step_s is not None and not self._is_reference:
            self._estimate.learn(self._running.cell, stage.step_s)
            self._guess()

    def tick(self) -> None:
        """Keep the bar up with the clock; a log gets a line now and then."""
        self._refresh()
        if self._bar.disable and self._now_s() - self._said_s >= HEARTBEAT_S and self._cell_progress:
            since = duration_label(self._cell_progress.elapsed_s)
            self.say(f"{self._place()}: running for {since}, {self._cell_progress.where()}; {self._eta()}")

    def leave_out(self, planned: PlannedCell) -> None:
        """Count a planned cell that does not run after all."""
        self._left.remove(planned)
        self._total -= 1

    def end(self, planned: PlannedCell, record: Record) -> None:
        assert self._cell_progress is not None
        line = f"{self._place()}: {outcome(record)} ({self._cell_progress.elapsed_s:.1f} s)"
        self._left.remove(planned)
        self._running = self._cell_progress = None
        timing = record.timing
        if timing is not None:
            self._estimate.learn(planned.cell, max(map(statistics.median, timing.step_times_ms)) / 1e3)
        self._guess()
        if record.status not in FINDINGS and record.failure is not None:
            folder = self._folder / "cells" / planned.folder_name
            line = f"{line}; log: {folder / f'rank_{record.failure.rank}.log'}"
        self.say(f"{line}; {self._eta()}" if self._left and self._waiting_s is not None else line)
        self._refresh()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Without the bar, for what others print."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """One line that stays; never folded, so that a path or a command can be copied."""
        self._said_s = self._now_s()
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _refresh(self) -> None:
        if self._bar.disable:
            return
        done, left = self._total - len(self._left), self._eta()
        where = "" if self._cell_progress is None else f"{self._label()}: {self._cell_progress.where()}"
        self._bar.update(self._sweep, total=self._total, completed=done, description=where, left=left)
        self._bar.refresh()

    def _label(self) -> str:
        if self._running is None:
            return ""
        if self._is_reference:
            return f"{short_label(self._running.cell)} as a reference"
        return self._labels.of(self._running.cell)

    def _place(self) -> str:
        """`[2/6] ring 64k sp 2`: the running cell and its place among those of this run."""
        if self._is_reference:
            return self._label()
        return f"[{self._total - len(self._left) + 1}/{self._total}] {self._label()}"

    def _eta(self) -> str:
        """`about 5 min left`; `at least 5 min left, as this cell is 2 min late` where it takes too long."""
        if not self._left:
            return ""
        left_s: float | None = 0.0
        if self._running is not None and self._cell_progress is not None:
            starts_ranks = self._estimate.cell_s(self._running) != 0.0
            left_s = self._cell_progress.left_s if starts_ranks else 0.0
        if self._waiting_s is None or left_s is None:
            return "time left unknown"
        left = f"{duration_label(self._waiting_s + max(0.0, left_s))} left"
        return (
            f"about {left}"
            if left_s > -LATE_S
            else f"at least {left}, as this cell is {duration_label(-left_s)} late"
        )

    def _guess(self) -> None:
        """How long the cells behind the running one will take; not at every tick: there may be thousands."""
        waiting = (planned for planned in self._left if planned is not self._running)
        self._waiting_s = self._estimate.remaining_s(waiting)


class _Bar(bars.Progress):
    """Two lines: what the running cell does, and how far the sweep is."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (Text(each.description, no_wrap=True, overflow="ellipsis") for each in self.tasks)
        yield from super().get_renderables()


def _placed_line(cell: Cell) -> str:
    """`ring: 2 x cpu over gloo, 1 thread each, qwen3_nano, zero3, bf16`; of a replay `rank 0 of 2 x cpu`."""
    cluster = cell.cluster
    rank = "" if cell.replay.rank is None else f"rank {cell.replay.rank} of "
    shared = ", ranks share GPUs: correctness only" if cluster.ranks_per_gpu > 1 else ""
    threads = "1 thread" if cluster.threads_per_rank == 1 else f"{cluster.threads_per_rank} threads"
    return (
        f"{cell.strategy}: {rank}{cluster.world_size} x {cluster.device} over {cluster.backend}{shared},"
        f" {threads} each, {cell.model.name}, {cell.engine.name}, {cell.dtype}"
    )
