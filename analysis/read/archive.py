"""Reads the records of sweeps' folders line by line into one frame.

Raw records are too large for memory. The archive keeps a row of numbers for each record, and the record's
place in its file, from which the page reads the record again.
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
from bench.record.record import Record, Status, is_result
from bench.record.store import RECORDS, StoreError, parse_record, records_with_offsets

VOLATILE: Mapping[str, None] = dict.fromkeys(("load_average", "gpu_temperature_c"))
"""Fields of an environment that change by the minute, with the value that replaces them."""
ORIGIN_COLUMNS: Mapping[str, str] = {"code": "code", "torch": "torch", "device": "device_name"}
"""Columns of the origins of a record, by the name that `--mix` takes. Records that differ in one are not
compared unless `--mix` names it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """Records of some folders. Of a repeat that ran again only the last attempt has a row."""

    frame: pd.DataFrame
    """One row per record."""
    places: Sequence[tuple[Path, int]]
    """File and first byte of each row's record."""
    shared_settings: Mapping[str, Any]
    """Settings that are equal in all records."""
    environments: Sequence[Environment]
    """Distinct environments of the records, without the VOLATILE fields."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of attempts that have no row, by the reason why their cell ran again."""

    def record(self, row: int) -> Record:
        """Read the record of a row of the frame from its file."""
        path, start = self.places[row]
        with path.open("rb") as file:
            file.seek(start)
            return parse_record(path, 0, file.readline())

    def with_equal_origins(self, kinds: Collection[str]) -> Archive:
        """Return the archive with one value, such as `1a2b and 3c4d`, in the columns of these origins.

        Records that differ in these origins are then compared.
        """
        columns = {ORIGIN_COLUMNS[kind]: " and ".join(origins(self.frame, kind)) or None for kind in kinds}
        return replace(self, frame=self.frame.assign(**columns))


def origins(frame: pd.DataFrame, kind: str) -> list[str]:
    """Return the distinct recorded values of one origin, a key of ORIGIN_COLUMNS, in alphabetical order."""
    return sorted(map(str, frame[ORIGIN_COLUMNS[kind]].dropna().unique()))


def read_archive(folders: Iterable[Path], peaks: Mapping[str, float]) -> Archive:
    """Read the records of all folders.

    Args:
        folders: folders of sweeps.
        peaks: peak FLOP/s by hardware name.

    Raises:
        StoreError: a folder has no records.jsonl, or a line of it is not a record. The message has one line.
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
        frame=frame.assign(steps_compared=_compared_steps(frame, [str(path) for path, _ in places])),
        places=places,
        shared_settings=_shared_settings(configs),
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
        yield from (((path, start), record) for start, record in records_with_offsets(path))


def _shared_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings in which all configurations agree."""
    first = configs[0] if configs else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in config and config[key] == value for config in configs)
    }


def _compared_steps(frame: pd.DataFrame, files: Sequence[str]) -> pd.Series[float]:
    """Return the number of steps of each record whose losses were compared with those of another cell.

    The cell that ran first was compared with nothing when it ran. If later cells of the same file agreed with
    it, the largest number of steps that one of them compared counts for it too.

    Args:
        frame: rows of the records.
        files: file of each row's record.
    """
    compared, file = frame["steps_compared"], pd.Series(files, index=frame.index, dtype="str")
    later = compared > 0
    by_base = compared[later].groupby([file[later], frame.loc[later, "compared_with"]]).max()
    first = frame.index[compared == 0]
    keys = pd.MultiIndex.from_arrays([file[first], frame.loc[first, "cell_id"]])
    of_first = pd.Series(by_base.reindex(keys).to_numpy(), index=first).fillna(0)
    return compared.where(compared != 0, of_first.clip(upper=frame["steps"][first]).reindex(frame.index))


def _last_attempts(frame: pd.DataFrame, files: Sequence[Path]) -> tuple[list[int], Counter[str]]:
    """Return the rows that are kept, and the number of other rows by the reason why their cell ran again.

    Rows with the same file, cell and repeat are attempts. The last one is kept, at the place of the first.
    """
    keys = [*zip(files, frame["cell_id"], frame["repeat"], strict=True)]
    last = {key: row for row, key in enumerate(keys)}
    attempts = frame[["role", "status", *ORIGIN_COLUMNS.values()]].to_dict("records")
    earlier = ((row, last[key]) for row, key in enumerate(keys) if row != last[key])
    return [*last.values()], Counter(_rerun_reason(attempts[row], attempts[newer]) for row, newer in earlier)


def _rerun_reason(attempt: Mapping[Any, Any], last: Mapping[Any, Any]) -> str:
    """Return why a cell ran again after this attempt: `failed or interrupted` or `with other code`."""
    if not is_result(str(attempt["role"]), Status(attempt["status"])):
        return "failed or interrupted"
    different = [name for name, column in ORIGIN_COLUMNS.items() if attempt[column] != last[column]]
    return f"with other {' and '.join(different)}" if different else "duplicated"
