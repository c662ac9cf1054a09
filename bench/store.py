"""`records.jsonl`: one writer, one line per record, each line on the disk before the next cell starts."""

from __future__ import annotations

import json
import os
import warnings
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
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"sweep_dir={self.folder}: another sweep is writing here; wait for it or name another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"sweep_dir={self.folder}: cannot be written to ({error.strerror or error}); name another"
                " folder"
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


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file, as written.

    A torn last line is dropped with one warning. Raises StoreError, with the line's number, for anything
    else that is no record of this schema.
    """
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        warnings.warn(f"{path}: dropped a torn last line", stacklevel=2)
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}:{number}: not a record: {error}") from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        raise StoreError(f"{path}:{number}: schema_version {version}, this is {SCHEMA_VERSION}")
    return dict(record)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _whole_lines_bytes(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
