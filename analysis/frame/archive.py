"""Sweeps' folders, read line by line.

Raw records are too large to keep. Of each we keep its row and its place in the file, for the page to show it.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.frame.columns import Columns
from analysis.frame.load import Record, columns_of, frame_of, joined, row_of
from analysis.metrics.recorded import Recorded, flaw, read_line
from bench.record import READABLE_VERSIONS, Status, is_finding
from bench.store import CHECK_PATH, DELETE_LINE, StoreError, parse_record

READ_AHEAD_BYTES = 2**18
BATCH_RECORDS = 128
"""So many records at a time become columns, for more leave the processor's caches before they do."""
VOLATILE = {"load_average": None, "gpu_temperature_c": None}
"""What of an environment changes by the minute."""


MADE_WITH: Mapping[str, str] = {"code": "code", "torch": "torch", "device": "device_name"}
"""What a finished cell runs again for, and the column that says it."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The whole lines of one records.jsonl: all but a torn last one."""

    path: Path
    end: int

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """The lines one by one, and the byte each starts at."""
        with self.path.open("rb", READ_AHEAD_BYTES) as file:
            start = 0
            while start < self.end:
                line = file.readline()
                yield start, line[:-1]
                start += len(line)


@dataclass(slots=True)
class Shared:
    """The settings in which all configurations agree that were added so far; None before the first."""

    settings: dict[str, Any] | None = None

    def add(self, config: Mapping[str, Any]) -> None:
        if self.settings is None:
            self.settings = dict(config)
        elif self.settings and not self.settings.items() <= config.items():
            self.settings = {k: v for k, v in self.settings.items() if k in config and config[k] == v}


@dataclass(slots=True)
class Environments:
    """The different environments that were added, in order, without what changes by the minute."""

    met: dict[str, dict[str, Any]] = field(default_factory=dict)
    last: dict[str, Any] | None = None

    def add(self, environment: Mapping[str, Any]) -> None:
        seen = {**environment, **VOLATILE}
        if seen != self.last:
            lasting = {key: value for key, value in environment.items() if key not in VOLATILE}
            self.met.setdefault(json.dumps(lasting, sort_keys=True), lasting)
            self.last = seen


@dataclass(frozen=True, slots=True)
class Read:
    """What is kept of one file: the columns of its rows and the byte at which each record starts."""

    columns: Columns
    starts: list[int]
    shared: Shared
    environments: Environments


@dataclass(frozen=True, slots=True)
class Archive:
    """All records of some folders, of a cell that was run again after a failure only the last attempt."""

    frame: pd.DataFrame
    """One row per record."""
    places: Sequence[tuple[Path, int]]
    """Row by row, file and byte of the record itself."""
    shared: Mapping[str, Any]
    """The settings that all records have in common."""
    environments: Sequence[Mapping[str, Any]]
    """The different ones that they ran in."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many attempts are not among the rows, by why their cell ran again."""

    def record(self, row: int) -> Record:
        """The whole record behind a row of the frame."""
        path, start = self.places[row]
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            return parse_record(path, 0, line, READABLE_VERSIONS)
        except StoreError:
            number = _line_number(path, start)
            return parse_record(path, number, line, READABLE_VERSIONS)


def read_archive(folders: Iterable[Path], peaks: Mapping[str, float]) -> Archive:
    """The records of all folders. `peaks` maps hardware to peak FLOP/s.

    Raises StoreError, in one line, for a folder without records and for a line that is no record.
    """
    files = [*map(_lines, folders)]
    reads = [read_file(lines, peaks) for lines in files]
    columns = joined([read.columns for read in reads], [len(read.starts) for read in reads])
    shared, environments = Shared(), Environments()
    for read in reads:
        if read.shared.settings is not None:
            shared.add(read.shared.settings)
        for environment in read.environments.met.values():
            environments.add(environment)
    places = [(lines.path, start) for lines, read in zip(files, reads, strict=True) for start in read.starts]
    last = _last_attempts(places, columns)
    frame = frame_of(columns)
    left_out = _left_out(frame, places, last)
    frame = frame if len(last) == len(frame) else frame.iloc[last].reset_index(drop=True)
    places = [places[row] for row in last]
    return Archive(
        frame=frame.assign(steps_held=_steps_held(frame, [str(path) for path, _ in places])),
        places=places,
        shared=shared.settings or {},
        environments=[*environments.met.values()],
        left_out=left_out,
    )


def _steps_held(frame: pd.DataFrame, files: Sequence[str]) -> pd.Series[float]:
    """Per record how many of its steps are held; `files` are where the records stand.

    What others were compared with is held by them: two that agree check each other. It came first, so its own
    record cannot say so.
    """
    held, file = frame["steps_held"], pd.Series(files, index=frame.index, dtype="str")
    others = held > 0
    by_others = held[others].groupby([file[others], frame.loc[others, "held_against"]]).max()
    first = frame.index[held == 0]
    found = by_others.reindex(pd.MultiIndex.from_arrays([file[first], frame.loc[first, "cell_id"]]))
    of_first = pd.Series(found.to_numpy(), index=first).fillna(0)
    return held.where(held != 0, of_first.clip(upper=frame["steps"][first]).reindex(frame.index))


def read_file(lines: Lines, peaks: Mapping[str, float]) -> Read:
    """Parse every line of a file; raises StoreError, with the line's number, at the first that is bad."""
    starts: list[int] = []
    shared, environments = Shared(), Environments()
    parts, counts = [], []
    places = iter(lines)
    while batch := [*islice(places, BATCH_RECORDS)]:
        rows = []
        for start, line in batch:
            record = _parsed(lines, 1 + len(starts), line)
            rows.append(row_of(record, peaks))
            shared.add(record.config)
            environments.add(record.environment or {})
            starts.append(start)
        parts.append(columns_of(rows))
        counts.append(len(rows))
    return Read(joined(parts, counts), starts, shared, environments)


def _parsed(lines: Lines, number: int, line: bytes) -> Recorded:
    try:
        return read_line(line)
    except (ValueError, RecursionError) as error:
        parse_record(lines.path, number, line, READABLE_VERSIONS)
        raise StoreError(f"{lines.path}:{number}: not a record: {flaw(error)}; {DELETE_LINE}") from None


def _lines(folder: Path) -> Lines:
    """The lines of a folder's records; a torn last line is left out with one warning."""
    path = folder / "records.jsonl"
    try:
        if not path.is_file():
            hint = "name a sweep's folder, for example results/sweeps/<time>"
            raise StoreError(f"{folder}: no file records.jsonl in this folder; {hint}")
        return _whole_lines(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error}); {CHECK_PATH}") from None


def _whole_lines(path: Path) -> Lines:
    if path.stat().st_size == 0:
        return Lines(path, 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            warnings.warn(f"{path}:{_line_number(path, whole)}: dropped a torn last line", stacklevel=2)
        return Lines(path, whole)


def _line_number(path: Path, start: int) -> int:
    """Which line of the file, from 1, starts at this byte."""
    with path.open("rb") as file:
        return 1 + file.read(start).count(b"\n")


def _left_out(frame: pd.DataFrame, places: Sequence[tuple[Path, int]], last: Sequence[int]) -> Counter[str]:
    """By why their cell ran again, how many rows do not count."""
    if len(last) == len(frame):
        return Counter()
    keys = [*zip((path for path, _ in places), frame["cell_id"], frame["repeat"], strict=True)]
    counts = {keys[row]: row for row in last}
    dropped = {row: counts[key] for row, key in enumerate(keys) if row != counts[key]}
    told = frame[["role", "status", *MADE_WITH.values()]].to_dict("records")
    return Counter(_why(told[row], told[newer]) for row, newer in dropped.items())


def _why(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> str:
    """What of an attempt made its cell run again."""
    if not is_finding(str(before["role"]), Status(before["status"])):
        return "failed or were interrupted"
    others = [name for name, column in MADE_WITH.items() if before[column] != after[column]]
    return f"of other {' and '.join(others)}" if others else "stand twice"


def _last_attempts(places: Sequence[tuple[Path, int]], columns: Columns) -> list[int]:
    """The rows that count: of equal file, cell and repeat the last one, where the first stood."""
    if not places:
        return []
    keys = zip((path for path, _ in places), columns["cell_id"], columns["repeat"], strict=True)
    return [*{key: row for row, key in enumerate(keys)}.values()]
