"""Sweeps' folders, read line by line.

Raw records are too large to keep. Of each we keep its row and its place in the file, for the page to show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from msgspec import json, structs

from analysis.read.frame import frame_of, row_of
from bench.common.environment import Environment
from bench.record.record import Record, Status, is_finding
from bench.record.store import RECORDS, StoreError, parse_record, placed_records

VOLATILE: Mapping[str, None] = dict.fromkeys(("load_average", "gpu_temperature_c"))
"""Fields of an environment that change by the minute, and the value that leaves them out."""
MADE_WITH: Mapping[str, str] = {"code": "code", "torch": "torch", "device": "device_name"}
"""What has to be equal for two records to be compared, unless `--mix` names it; and the column with it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """All records of some folders, of a cell that was run again after a failure only the last attempt."""

    frame: pd.DataFrame
    """One row per record."""
    places: Sequence[tuple[Path, int]]
    """Row by row, file and byte of the record itself."""
    shared: Mapping[str, Any]
    """The settings that all records have in common."""
    environments: Sequence[Environment]
    """The different ones that they ran in, without what changes by the minute."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many attempts are not among the rows, by why their cell ran again."""

    def record(self, row: int) -> Record:
        """The whole record behind a row of the frame."""
        path, start = self.places[row]
        with path.open("rb") as file:
            file.seek(start)
            return parse_record(path, 0, file.readline())

    def mixed(self, kinds: Collection[str]) -> Archive:
        """The archive with these kinds of MADE_WITH treated as equal: a column names all its values."""
        columns = {MADE_WITH[kind]: " and ".join(origins(self.frame, kind)) or None for kind in kinds}
        return replace(self, frame=self.frame.assign(**columns))


def origins(frame: pd.DataFrame, kind: str) -> list[str]:
    """The different values of one kind of MADE_WITH, in alphabetical order, of the records that say it."""
    return sorted(map(str, frame[MADE_WITH[kind]].dropna().unique()))


def read_archive(folders: Iterable[Path], peaks: Mapping[str, float]) -> Archive:
    """The records of all folders. `peaks` maps hardware to peak FLOP/s.

    Raises StoreError, in one line, for a folder without records and for a line that is no record.
    """
    rows, places, configs = [], [], []
    environments: dict[bytes, Environment] = {}
    for place, record in _records(folders):
        rows.append(row_of(record, peaks))
        places.append(place)
        configs.append(record.config)
        lasting = structs.replace(record.environment, **VOLATILE)
        environments.setdefault(json.encode(lasting), lasting)
    frame = frame_of(rows)
    last, left_out = _last_attempts(frame, [path for path, _ in places])
    frame, places = frame.iloc[last].reset_index(drop=True), [places[row] for row in last]
    return Archive(
        frame=frame.assign(steps_compared=_steps_held(frame, [str(path) for path, _ in places])),
        places=places,
        shared=_shared(configs),
        environments=[*environments.values()],
        left_out=left_out,
    )


def _records(folders: Iterable[Path]) -> Iterator[tuple[tuple[Path, int], Record]]:
    """Yield every record with its file and first byte."""
    for folder in folders:
        path = folder / RECORDS
        if not path.is_file():
            hint = "name a sweep's folder, for example results/sweeps/<time>"
            raise StoreError(f"{folder}: no file records.jsonl in this folder; {hint}")
        yield from (((path, start), record) for start, record in placed_records(path))


def _shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in which all configurations agree."""
    first = configs[0] if configs else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in each and each[key] == value for each in configs)
    }


def _steps_held(frame: pd.DataFrame, files: Sequence[str]) -> pd.Series[float]:
    """Per record how many of its steps are held; `files` are where the records stand.

    What others were compared with is held by them: two that agree check each other. It came first, so its own
    record cannot say so.
    """
    held, file = frame["steps_compared"], pd.Series(files, index=frame.index, dtype="str")
    others = held > 0
    by_others = held[others].groupby([file[others], frame.loc[others, "compared_with"]]).max()
    first = frame.index[held == 0]
    found = by_others.reindex(pd.MultiIndex.from_arrays([file[first], frame.loc[first, "cell_id"]]))
    of_first = pd.Series(found.to_numpy(), index=first).fillna(0)
    return held.where(held != 0, of_first.clip(upper=frame["steps"][first]).reindex(frame.index))


def _last_attempts(frame: pd.DataFrame, files: Sequence[Path]) -> tuple[list[int], Counter[str]]:
    """The rows that count, and how many do not by why their cell ran again.

    Of equal file, cell and repeat the last one counts, where the first stood.
    """
    keys = [*zip(files, frame["cell_id"], frame["repeat"], strict=True)]
    last = {key: row for row, key in enumerate(keys)}
    told = frame[["role", "status", *MADE_WITH.values()]].to_dict("records")
    earlier = ((row, last[key]) for row, key in enumerate(keys) if row != last[key])
    return [*last.values()], Counter(_why(told[row], told[newer]) for row, newer in earlier)


def _why(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> str:
    """What of an attempt made its cell run again."""
    if not is_finding(str(before["role"]), Status(before["status"])):
        return "failed or were interrupted"
    others = [name for name, column in MADE_WITH.items() if before[column] != after[column]]
    return f"of other {' and '.join(others)}" if others else "stand twice"
