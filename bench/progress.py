"""What a person sees while a sweep runs: a bar in a terminal, plain lines in a log."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from bench.cell import PlannedCell
from bench.config import RunConfig
from bench.eta import Estimate
from bench.record import Record, Status
from bench.words import length_label


class Progress:
    """Follows one sweep on one console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._estimate = Estimate()
        self._left: list[PlannedCell] = []
        self._total = 0
        self._bar: Bar | None = None
        self._label = ""
        self._started = 0.0

    def start(self, cells: Sequence[PlannedCell], folder: Path) -> None:
        """Say what is planned and on what."""
        self._left, self._total = list(cells), len(cells)
        self.console.print(f"{len(cells)} cells, records in {folder}", highlight=False, markup=False)
        for line in sorted({_picked(planned.cell) for planned in cells}):
            self.console.print(line, highlight=False, markup=False)
        if self.console.is_terminal and cells:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}"),
                console=self.console,
                transient=True,
            )
            self._bar.add_task("", total=self._total, eta="")
            self._bar.start()

    def begin(self, planned: PlannedCell) -> None:
        self._label = cell_label(planned.cell)
        self._started = time.monotonic()
        self.tell("starting")

    def tell(self, phase: str) -> None:
        """The running cell's pass; only a bar shows it."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{self._label}: {phase}", eta=self._eta())

    def end(self, planned: PlannedCell, record: Record) -> None:
        self._left.remove(planned)
        self._estimate.learn(planned.cell, record)
        done = self._total - len(self._left)
        wall_s = time.monotonic() - self._started
        line = f"[{done}/{self._total}] {self._label}: {outcome(record)} ({wall_s:.1f} s)"
        eta = self._eta()
        self.console.print(f"{line}; {eta}" if eta else line, highlight=False, soft_wrap=True, markup=False)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, eta=eta)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _eta(self) -> str:
        seconds = self._estimate.remaining_s(planned.cell for planned in self._left)
        if not self._left:
            return ""
        return "time left unknown" if seconds is None else f"about {_minutes(seconds)} left"


def cell_label(cell: RunConfig) -> str:
    """A cell in a few words: `ulysses 64k sp 2`."""
    degree = f" sp {cell.sp_degree}" if cell.sp_degree > 1 else ""
    return f"{cell.strategy} {length_label(cell.seq_len)}{degree}"


def outcome(record: Record) -> str:
    """Tokens per second of the slowest rank's median step, or what went wrong and why."""
    if record.status is not Status.OK or record.timing is None:
        return f"{record.status.value}: {record.reason}"
    slowest_ms = [max(step) for step in zip(*record.timing.step_times_ms, strict=True)]
    rate = record.timing.tokens_per_step / statistics.median(slowest_ms) * 1e3
    return f"{rate:,.0f} tokens/s, n={len(slowest_ms)}"


def _picked(cell: RunConfig) -> str:
    cluster = cell.cluster
    shared = ", ranks share GPUs: correctness only" if cluster.ranks_per_gpu > 1 else ""
    return (
        f"{cell.strategy}: {cluster.world_size} x {cluster.device} over {cluster.backend}{shared},"
        f" {cluster.threads_per_rank} threads each, {cell.model.name}, {cell.engine}, {cell.dtype}"
    )


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
