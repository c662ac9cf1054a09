"""`records.jsonl`: one writer, one line per record, each line on the disk before the next cell starts."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from bench.config import ConfigError
from bench.record import SCHEMA_VERSION, Record


class StoreError(ValueError):
    """A records file that cannot be trusted; the message names file and line."""


class Store:
    """The records of one sweep's folder, held by one writer at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "records.jsonl"
        self._lock = FileLock(folder / ".lock")

    def __enter__(self) -> Self:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"sweep_dir={self.folder}: another sweep is writing here; wait for it or name another folder"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        """Add one line and wait until it is on the disk. A torn line before it is cut off first."""
        line = json.dumps(record.to_json(), allow_nan=False, separators=(",", ":")) + "\n"
        with self.path.open("ab") as file:
            file.truncate(_whole_lines_bytes(self.path))
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        return read_records(self.path) if self.path.exists() else []


def read_records(path: Path, versions: Collection[int] = (SCHEMA_VERSION,)) -> list[dict[str, Any]]:
    """All records of a file, as written, of any of these schema versions.

    A torn last line is dropped with one warning. Raises StoreError, with the line's number, for anything
    else that is no such record.
    """
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        warnings.warn(f"{path}: dropped a torn last line", stacklevel=2)
    return [parse_record(path, number, line, versions) for number, line in enumerate(lines, start=1)]


def parse_record(
    path: Path, number: int, line: bytes, versions: Collection[int] = (SCHEMA_VERSION,)
) -> dict[str, Any]:
    """One line as a record; raises StoreError, with file and line, where it is none of these versions."""
    try:
        record = _STRICT.decode(line.decode())
    except (ValueError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}:{number}: not a record: {error}") from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version not in versions:
        known = " or ".join(map(str, sorted(versions)))
        raise StoreError(f"{path}:{number}: schema_version {version}, readable here is {known}")
    return dict(record)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once: `json.loads` would make one for every line."""


def _whole_lines_bytes(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
