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

TIME_GOAL, MEMORY_GOAL = 0.10, 0.05
"""Of the median absolute error."""
VERDICT_OF_STATUS: Mapping[Status, Fit] = {Status.OK: Fit.FITS, Status.OUT_OF_MEMORY: Fit.OUT_OF_MEMORY}


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of all processes of one cell."""

    statuses: tuple[Status, ...]
    step_ms: tuple[float, ...]
    """Each process's median step of the slowest rank."""
    peak_bytes: int | None

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Measured:
        worked = [record for record in records if record["status"] == Status.OK]
        peaks = [max(record["memory"]["peak_allocated_bytes"]) for record in worked if record["memory"]]
        return cls(
            tuple(Status(record["status"]) for record in records),
            tuple(_step_ms(record) for record in worked),
            max(peaks, default=None),
        )

    @property
    def verdict(self) -> Fit | None:
        """None where processes disagree or ended in another way."""
        found = {VERDICT_OF_STATUS.get(status) for status in self.statuses}
        return found.pop() if len(found) == 1 else None

    @property
    def failures(self) -> tuple[Status, ...]:
        """How processes ended that say nothing of time or memory."""
        return tuple(status for status in self.statuses if status not in VERDICT_OF_STATUS)

    @property
    def spread(self) -> float | None:
        """Half the range of the repeats over their median."""
        if len(self.step_ms) <= 1:
            return None
        return (max(self.step_ms) - min(self.step_ms)) / 2 / statistics.median(self.step_ms)


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell."""

    line: str
    """Its words in the list."""
    measured: Measured
    predicted: Prediction
    is_limited: bool
    """Whether its ranks have a limit of memory, so that there is a verdict."""

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less one."""
        if not self.measured.step_ms:
            return None
        return self.predicted.step_time_ms.expected / statistics.median(self.measured.step_ms) - 1

    @property
    def memory_error(self) -> float | None:
        if self.measured.peak_bytes is None:
            return None
        return self.predicted.peak_allocated_bytes.expected / self.measured.peak_bytes - 1

    @property
    def is_within_band(self) -> bool | None:
        """Whether the measured median lies between the ends of the prediction."""
        if not self.measured.step_ms:
            return None
        band = self.predicted.step_time_ms
        return band.low <= statistics.median(self.measured.step_ms) <= band.high

    @property
    def is_verdict_right(self) -> bool | None:
        """None without a limit. What is undecided is not right."""
        return self.predicted.fit is self.measured.verdict if self.is_limited else None


def compared(
    lines: Sequence[str],
    cells: Sequence[RunConfig],
    records: Iterable[Mapping[str, Any]],
    hardware: Hardware,
) -> list[Compared]:
    """Every cell that has a record and a prediction, in the list's order."""
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_id.setdefault(record["cell_id"], []).append(record)
    machine, found = this_machine(), []
    for line, cell in zip(lines, cells, strict=True):
        predicted = predict(cell, hardware, usable_bytes(cell, machine))
        if predicted is not None and cell.cell_id in by_id:
            is_limited = cell.cluster.memory_limit_gib is not None
            found.append(Compared(line, Measured.of(by_id[cell.cell_id]), predicted, is_limited))
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """How far off all predictions are together."""

    time_errors: tuple[float, ...]
    memory_errors: tuple[float, ...]
    verdicts: tuple[bool, ...]
    within: tuple[bool, ...]
    failed: tuple[str, ...] = ()
    """Cells of which some process neither worked nor ran out of memory, with how it ended."""

    @classmethod
    def of(cls, cells: Sequence[Compared]) -> Score:
        return cls(
            tuple(abs(each.time_error) for each in cells if each.time_error is not None),
            tuple(abs(each.memory_error) for each in cells if each.memory_error is not None),
            tuple(each.is_verdict_right for each in cells if each.is_verdict_right is not None),
            tuple(each.is_within_band for each in cells if each.is_within_band is not None),
            tuple(f"{each.line}: {each.measured.failures[0]}" for each in cells if each.measured.failures),
        )

    def missed(self) -> list[str]:
        """What of the goals is missed, in words."""
        lines = []
        for name, errors, goal in (
            ("step time", self.time_errors, TIME_GOAL),
            ("peak allocated", self.memory_errors, MEMORY_GOAL),
        ):
            if not errors:
                lines.append(f"no cell has a {name}")
            elif statistics.median(errors) >= goal:
                lines.append(f"the median error of {name} should stay under {goal:.0%}")
        if not all(self.verdicts):
            lines.append("every verdict on memory should be right")
        return [*lines, *(f"every cell should run or run out of memory ({each})" for each in self.failed)]


def table(cells: Sequence[Compared]) -> list[str]:
    """One line a cell: real, predicted and error of time and of memory, as SimuMax prints them."""
    head = (
        f"{'step ms':>9} {'+-':>5} {'predicted':>9} {'error':>7}  {'peak MiB':>8} {'predicted':>9}"
        f" {'error':>7}  {'memory: measured':16} {'predicted':13}  cell"
    )
    return [head, *map(_row, cells)]


def score_lines(score: Score) -> list[str]:
    """Median and worst error, and verdicts."""
    lines = [
        f"{name}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(errors)} cells"
        for name, errors in (("step time", score.time_errors), ("peak allocated", score.memory_errors))
        if errors
    ]
    return [
        *lines,
        f"step time within the prediction's band: {sum(score.within)} of {len(score.within)} cells",
        f"verdicts on memory: {sum(score.verdicts)} of {len(score.verdicts)} right",
    ]


def _row(cell: Compared) -> str:
    measured, predicted = cell.measured, cell.predicted
    step = statistics.median(measured.step_ms) if measured.step_ms else None
    peak = None if measured.peak_bytes is None else measured.peak_bytes / MIB
    told = cell.is_limited
    verdict = "" if not told else (measured.verdict or "/".join(sorted({*measured.statuses})))
    fit = "" if not told or predicted.fit is None else predicted.fit
    return (
        f"{_number(step)} {_share(measured.spread, 5)} {_number(predicted.step_time_ms.expected)}"
        f" {_share(cell.time_error, 7, signed=True)}  {_number(peak, 8)}"
        f" {_number(predicted.peak_allocated_bytes.expected / MIB)}"
        f" {_share(cell.memory_error, 7, signed=True)}  {verdict:16} {fit:13}  {cell.line}"
    )


def _number(value: float | None, width: int = 9) -> str:
    return " " * width if value is None else f"{value:{width}.1f}"


def _share(value: float | None, width: int, *, signed: bool = False) -> str:
    if value is None:
        return " " * width
    return f"{value:+{width}.1%}" if signed else f"{value:{width}.1%}"


def _step_ms(record: Mapping[str, Any]) -> float:
    of_ranks: Sequence[Sequence[float]] = record["timing"]["step_times_ms"]
    return float(statistics.median(map(max, zip(*of_ranks, strict=True))))
