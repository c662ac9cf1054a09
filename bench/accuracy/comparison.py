"""Predicted beside measured, cell by cell, and how far off the model is over all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.config import RunConfig
from bench.cost.fit import Fit
from bench.cost.hardware import Hardware
from bench.cost.prediction import Prediction, predict
from bench.environment import this_machine
from bench.labels import MIB
from bench.record import Status
from bench.request.hardware import usable_bytes
from bench.statistics import slowest_median

TIME_GOAL, MEMORY_GOAL = 0.10, 0.05
"""Of the median absolute error."""
JsonRecord = Mapping[str, Any]
VERDICT_OF_STATUS: Mapping[Status, Fit] = {Status.OK: Fit.FITS, Status.OUT_OF_MEMORY: Fit.OUT_OF_MEMORY}


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell: its prediction, and what became of all its processes."""

    line: str
    """Its words in the list."""
    predicted: Prediction
    is_limited: bool
    """Whether its ranks have a limit of memory, so that there is a verdict."""
    statuses: tuple[Status, ...]
    step_ms: tuple[float, ...]
    """Each process's median step of the slowest rank."""
    peak_bytes: int | None

    @classmethod
    def of(cls, line: str, cell: RunConfig, predicted: Prediction, records: Sequence[JsonRecord]) -> Compared:
        worked = [record for record in records if record["status"] == Status.OK]
        peaks = [max(record["memory"]["peak_allocated_bytes"]) for record in worked if record["memory"]]
        return cls(
            line,
            predicted,
            is_limited=cell.cluster.memory_limit_gib is not None,
            statuses=tuple(Status(record["status"]) for record in records),
            step_ms=tuple(slowest_median(record["timing"]["step_times_ms"]) for record in worked),
            peak_bytes=max(peaks, default=None),
        )

    @property
    def verdict(self) -> Fit | None:
        """None where processes disagree or ended in another way."""
        found = {VERDICT_OF_STATUS.get(status) for status in self.statuses}
        return found.pop() if len(found) == 1 else None

    @property
    def failure(self) -> Status | None:
        """How the first process ended that says nothing of time or memory."""
        return next((status for status in self.statuses if status not in VERDICT_OF_STATUS), None)

    @property
    def measured_ms(self) -> float | None:
        """The median process."""
        return statistics.median(self.step_ms) if self.step_ms else None

    @property
    def spread(self) -> float | None:
        """Half the range of the repeats over their median."""
        if len(self.step_ms) <= 1:
            return None
        return (max(self.step_ms) - min(self.step_ms)) / 2 / statistics.median(self.step_ms)

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less one."""
        measured = self.measured_ms
        return None if measured is None else self.predicted.step_time_ms.expected / measured - 1

    @property
    def memory_error(self) -> float | None:
        if self.peak_bytes is None:
            return None
        return self.predicted.peak_allocated_bytes.expected / self.peak_bytes - 1

    @property
    def is_within_band(self) -> bool | None:
        """Whether the measured median lies between the ends of the prediction."""
        band, measured = self.predicted.step_time_ms, self.measured_ms
        return None if measured is None else band.low <= measured <= band.high

    @property
    def is_verdict_right(self) -> bool | None:
        """None without a limit. What is undecided is not right."""
        return self.predicted.fit is self.verdict if self.is_limited else None


def compared(
    cells: Mapping[str, RunConfig], records: Iterable[JsonRecord], hardware: Hardware
) -> list[Compared]:
    """Every cell that has a record and a prediction, in the list's order; `cells` are by their line in it."""
    by_id: dict[str, list[JsonRecord]] = {}
    for record in records:
        by_id.setdefault(record["cell_id"], []).append(record)
    machine, found = this_machine(), []
    for line, cell in cells.items():
        predicted = predict(cell, hardware, usable_bytes(cell, machine))
        if predicted is not None and cell.cell_id in by_id:
            found.append(Compared.of(line, cell, predicted, by_id[cell.cell_id]))
    return found


def score_lines(cells: Sequence[Compared]) -> list[str]:
    """Median and worst error, and verdicts."""
    within = [each.is_within_band for each in cells if each.is_within_band is not None]
    verdicts = [each.is_verdict_right for each in cells if each.is_verdict_right is not None]
    lines = [
        f"{name}: median error {statistics.median(found):.1%}, worst {max(found):.1%}, {len(found)} cells"
        for name, found, _ in _of_goals(cells)
        if found
    ]
    return [
        *lines,
        f"step time within the prediction's band: {sum(within)} of {len(within)} cells",
        f"verdicts on memory: {sum(verdicts)} of {len(verdicts)} right",
    ]


def missed(cells: Sequence[Compared]) -> list[str]:
    """What of the goals is missed, in words."""
    lines = []
    for name, found, goal in _of_goals(cells):
        if not found:
            lines.append(f"no cell has a {name}")
        elif statistics.median(found) >= goal:
            lines.append(f"the median error of {name} should stay under {goal:.0%}")
    if any(each.is_verdict_right is False for each in cells):
        lines.append("every verdict on memory should be right")
    failed = (f"{each.line}: {each.failure}" for each in cells if each.failure)
    return [*lines, *(f"every cell should run or run out of memory ({each})" for each in failed)]


def _of_goals(cells: Sequence[Compared]) -> tuple[tuple[str, list[float], float], ...]:
    """What is predicted, the sizes of its errors, and the goal of their median."""
    times = [abs(each.time_error) for each in cells if each.time_error is not None]
    peaks = [abs(each.memory_error) for each in cells if each.memory_error is not None]
    return ("step time", times, TIME_GOAL), ("peak allocated", peaks, MEMORY_GOAL)


def table(cells: Sequence[Compared]) -> list[str]:
    """One line a cell: real, predicted and error of time and of memory, as SimuMax prints them."""
    head = (
        f"{'step ms':>9} {'+-':>5} {'predicted':>9} {'error':>7}  {'peak MiB':>8} {'predicted':>9}"
        f" {'error':>7}  {'memory: measured':16} {'predicted':13}  cell"
    )
    return [head, *map(_row, cells)]


def _row(cell: Compared) -> str:
    predicted = cell.predicted
    peak = None if cell.peak_bytes is None else cell.peak_bytes / MIB
    verdict, fit = "", ""
    if cell.is_limited:
        verdict, fit = cell.verdict or "/".join(sorted({*cell.statuses})), predicted.fit or ""
    return (
        f"{_shown(cell.measured_ms, '9.1f')} {_shown(cell.spread, '5.1%')}"
        f" {predicted.step_time_ms.expected:9.1f} {_shown(cell.time_error, '+7.1%')}  {_shown(peak, '8.1f')}"
        f" {predicted.peak_allocated_bytes.expected / MIB:9.1f} {_shown(cell.memory_error, '+7.1%')}"
        f"  {verdict:16} {fit:13}  {cell.line}"
    )


def _shown(value: float | None, form: str) -> str:
    """As wide as its form says, also where there is none."""
    return " " * len(f"{0:{form}}") if value is None else f"{value:{form}}"
