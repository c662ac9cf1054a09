"""What became of the cells of one sweep in another: faster, slower, no clear difference, another status."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.frame.archive import Archive
from analysis.labels import status_label
from analysis.metrics.measured import slowest_rank_ms
from bench.statistics import interval_rank

CELL = ("cell_id", "provenance")
"""What has to be equal for two records to be of one cell. The machine may differ, and is named then."""
NOT_COMPARED = frozenset({"argv", "packages"})

Key = tuple[str, str]

NOT_RECORDED = "not recorded"
NOTHING = frozenset({NOT_RECORDED, "None", "[]"})
"""What two sides may call the same absence: an older record lacks what a newer one has as empty."""


RESAMPLES = 4000
SEED = 0
"""The same samples always give the same interval."""
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians with its 95 % interval, which is missing where there are too few samples."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_one(self) -> bool:
        return self.low is not None and self.low > 1

    @property
    def is_below_one(self) -> bool:
        return self.high is not None and self.high < 1


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in both sweeps."""

    key: Key
    statuses: tuple[str, str]
    n: tuple[int, int]
    n_of: str
    ratio: Ratio | None
    """Of speeds, after over before; None where a side has no time."""

    @property
    def outcome(self) -> str:
        before, after = map(status_label, self.statuses)
        if before != after:
            return f"was {before}, is {after}"
        if self.ratio is None:
            return f"{before} in both"
        if self.ratio.is_above_one:
            return "faster"
        return "slower" if self.ratio.is_below_one else "no clear difference"


def changes(before: Archive, after: Archive) -> list[Change]:
    """Every cell that is in both archives, in the order of the first."""
    rows_before, rows_after = _rows(before.frame), _rows(after.frame)
    return [
        _change(key, (before, rows), (after, rows_after[key]))
        for key, rows in rows_before.items()
        if key in rows_after
    ]


def only_in(one: Archive, other: Archive) -> list[Key]:
    """The cells of one archive that the other does not have."""
    others = _rows(other.frame).keys()
    return [key for key in _rows(one.frame) if key not in others]


def environment_differences(before: Archive, after: Archive) -> list[tuple[str, str, str]]:
    """Name and both values of whatever differs between what the two ran in: code, software, machine."""
    values = [_environment_values(archive.environments) for archive in (before, after)]
    names = dict.fromkeys(name for each in values for name in each)
    pairs = [(name, *(each.get(name, NOT_RECORDED) for each in values)) for name in names]
    return [(name, one, other) for name, one, other in pairs if one != other and {one, other} - NOTHING]


def _rows(frame: pd.DataFrame) -> dict[Key, list[int]]:
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(zip(*(frame[name] for name in CELL), strict=True)):
        rows.setdefault(key, []).append(row)
    return rows


def _change(key: Key, before: tuple[Archive, Sequence[int]], after: tuple[Archive, Sequence[int]]) -> Change:
    times = [_step_times(*side) for side in (before, after)]
    n_of = "repeats" if all(len(side) > 1 for side in times) else "steps"
    samples = [_samples(side, n_of) for side in times]
    statuses = [_status(archive.frame, rows) for archive, rows in (before, after)]
    return Change(
        key=key,
        statuses=(statuses[0], statuses[1]),
        n=(len(samples[0]), len(samples[1])),
        n_of=n_of,
        ratio=speed_ratio(samples[0], samples[1]) if all(samples) else None,
    )


def _step_times(archive: Archive, rows: Sequence[int]) -> list[list[float]]:
    """Per repeat that worked the times of its steps in ms."""
    records = (archive.record(row) for row in rows if archive.frame["status"].iloc[row] == "ok")
    return [slowest_rank_ms(record["timing"]["step_times_ms"]) for record in records if record.get("timing")]


def _samples(repeats: Sequence[Sequence[float]], n_of: str) -> list[float]:
    """Like is compared with like: repeats where both sides have several, else steps."""
    if n_of == "repeats":
        return [statistics.median(steps) for steps in repeats]
    return [step for steps in repeats for step in steps]


def _status(frame: pd.DataFrame, rows: Sequence[int]) -> str:
    """That of a failed repeat where there is one."""
    statuses = [str(frame["status"].iloc[row]) for row in rows]
    return next((status for status in statuses if status != "ok"), "ok")


def _environment_values(environments: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    met: dict[str, dict[str, None]] = {}
    for environment in environments:
        packages = environment.get("packages") or {}
        flat = {name: value for name, value in environment.items() if name not in NOT_COMPARED}
        for name, value in {**flat, **packages}.items():
            met.setdefault(name, {})[str(value)] = None
    return {name: " and ".join(values) for name, values in met.items()}


def speed_ratio(before_ms: Sequence[float], after_ms: Sequence[float]) -> Ratio:
    """Median of the times before over that after: 2 where the same work takes half the time.

    The interval is a percentile bootstrap of that ratio (B. Efron, Bootstrap Methods, 1979), each side drawn
    by itself. It exists where both sides have the six samples that an interval of a median takes.
    """
    before, after = np.asarray(before_ms), np.asarray(after_ms)
    value = float(np.median(before) / np.median(after))
    if not (interval_rank(len(before)) and interval_rank(len(after))):
        return Ratio(value)
    random = np.random.default_rng(SEED)
    medians = (
        np.median(samples[random.integers(len(samples), size=(RESAMPLES, len(samples)))], axis=1)
        for samples in (before, after)
    )
    ratios = np.divide(*medians)
    low, high = np.percentile(ratios, PERCENTILES)
    return Ratio(value, float(low), float(high))
