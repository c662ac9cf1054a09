"""What became of the cells of one sweep in another: faster, slower, undecided, another status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from msgspec import to_builtins

from analysis.cells.difference import Difference, Processes, difference, processes_of
from analysis.labels import status_label
from analysis.read.archive import Archive
from bench.common.environment import Environment
from bench.record.record import Provenance

CELL = ("cell_id", "provenance")
"""What has to be equal for two records to be of one cell. The machine may differ, and is named then."""
NOT_COMPARED = frozenset({"argv", "packages", "inherited_env"})

Key = tuple[str, str]

NOT_RECORDED = "not recorded"
ON_SPEED = ("unstable", "very unstable", "the machine was busy", "throttled", "warmed up with shorter steps")
"""How the notes begin that bear on a ratio of speeds."""


@dataclass(frozen=True, slots=True)
class Side:
    """One cell in one of the sweeps."""

    status: str
    processes: Processes
    load: float | None
    """The machine's load average when timing began, the highest of all processes; None where not recorded."""
    notes: tuple[str, ...]
    """What a reader must know of its steps and its machine, such as `unstable`."""


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in both sweeps."""

    key: Key
    before: Side
    after: Side
    difference: Difference | None
    """Of speeds, after over before; None where a side has no speed. Without an interval of predictions."""

    @property
    def is_undecided(self) -> bool:
        return self.difference is not None and self.difference.undecided is not None

    @property
    def is_predicted(self) -> bool:
        """Whether it is arithmetic, which has no processes: then any other figure is another prediction."""
        return self.key[1] == Provenance.PREDICTED

    @property
    def outcome(self) -> str:
        before, after = (status_label(side.status) for side in (self.before, self.after))
        if before != after:
            return f"was {before}, is {after}"
        if self.difference is None:
            return f"{before} in both"
        if self.difference.undecided is not None:
            return f"undecided: {self.difference.undecided}"
        if self.is_predicted:
            return "predicted the same" if self.difference.ratio == 1 else "predicted otherwise"
        found = "faster" if self.difference.is_faster else "slower" if self.difference.is_slower else ""
        if not found:
            return "no clear difference"
        return f"{found} without the link (replayed)" if self.key[1] == Provenance.REPLAYED else found


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
    return [(name, one, other) for name, one, other in pairs if one != other]


def _rows(frame: pd.DataFrame) -> dict[Key, list[int]]:
    """Without synthetic records, which are evidence for nothing."""
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(zip(*(frame[name] for name in CELL), strict=True)):
        if key[1] != Provenance.SYNTHETIC:
            rows.setdefault(key, []).append(row)
    return rows


def _change(key: Key, *sides: tuple[Archive, Sequence[int]]) -> Change:
    before, after = (_side(*side) for side in sides)
    is_timed = bool(before.processes) and bool(after.processes)
    compare = predicted_difference if key[1] == Provenance.PREDICTED else difference
    return Change(key, before, after, compare(after.processes, before.processes) if is_timed else None)


def predicted_difference(one: Processes, other: Processes) -> Difference:
    """One predicted speed over another of the same cell."""
    return Difference(None, one.tokens_per_s[0] / other.tokens_per_s[0])


def _side(archive: Archive, rows: Sequence[int]) -> Side:
    records = archive.frame.iloc[[*rows]]
    timed = records[(records["status"] == "ok") & records["tokens_per_s"].notna()]
    telemetries = (archive.record(row).telemetry for row in rows)
    loads = [each.load_average for each in telemetries if each is not None]
    return Side(
        status=_status(archive.frame, rows),
        processes=processes_of(timed),
        load=max(loads, default=None),
        notes=tuple(dict.fromkeys(_flags(timed["note"]))),
    )


def _flags(notes: pd.Series[str]) -> list[str]:
    """`unstable`, `the machine was busy`: what the notes on speeds begin with."""
    parts = [part.partition(":")[0] for note in notes.dropna() for part in note.split("; ")]
    return [part for part in parts if part.startswith(ON_SPEED)]


def _status(frame: pd.DataFrame, rows: Sequence[int]) -> str:
    """That of a failed repeat where there is one."""
    statuses = [str(frame["status"].iloc[row]) for row in rows]
    return next((status for status in statuses if status != "ok"), "ok")


def _environment_values(environments: Sequence[Environment]) -> dict[str, str]:
    met: dict[str, dict[str, None]] = {}
    for environment in environments:
        flat = {name: value for name, value in to_builtins(environment).items() if name not in NOT_COMPARED}
        for name, value in {**flat, **environment.packages, **environment.inherited_env}.items():
            if value is not None:
                met.setdefault(name, {})[str(value)] = None
    return {name: " and ".join(values) for name, values in met.items()}
