"""`records.jsonl`: one writer, one line a record, on the disk before the next cell starts."""

from __future__ import annotations

import json
import mmap
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
from filelock import FileLock, Timeout

from bench.common.labels import shown
from bench.config import ConfigError
from bench.record.record import SCHEMA_VERSION, Record, Status

RECORDS = "records.jsonl"
"""The file's name in a sweep's folder."""
CHECK_PATH = "check the path and its permissions"
DELETE_LINE = "delete the line; its sweep with resume=true runs that cell again"


class StoreError(ValueError):
    """A file of records that cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What every record says of itself, whatever ran."""

    cell_id: str
    repeat: int
    role: str
    status: Status
    wall_s: float
    config: dict[str, Any]


class Store:
    """The records of one sweep's folder, held by one writer at a time."""

    def __init__(self, folder: Path, wait_s: float = 0.0) -> None:
        """`wait_s`: how long another writer is waited for; then it is an error that there is one."""
        self.folder = folder
        self.wait_s = wait_s
        self.path = folder / RECORDS
        self._is_new = False
        self._lock = FileLock(folder / ".lock")

    def __enter__(self) -> Self:
        try:
            self._is_new = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self.wait_s)
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
        if self._is_new:
            with suppress(OSError):  # there are records
                self.folder.rmdir()

    def append(self, record: Record) -> None:
        """Add one line and wait until it is on the disk. A torn line before it is cut off first."""
        line = json.dumps(record.to_json(), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        try:
            with self.path.open("a+b") as file:
                file.truncate(_whole_lines_bytes(file))
                # Bytes of a path that are not UTF-8 become question marks.
                _append_whole(file.fileno(), line.encode(errors="replace") + b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), os.fspath(self.path)) from None

    def read(self) -> list[dict[str, Any]]:
        return read_records(self.path) if self.path.exists() else []


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file, as written.

    A torn last line is dropped with one warning. Any other line that is not such a record raises StoreError
    with its number.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error}); {CHECK_PATH}") from None
    lines = content.split(b"\n")
    torn = lines.pop()
    records = [parse_record(path, number, line) for number, line in enumerate(lines, start=1)]
    for number, record in enumerate(records, start=1):
        try:
            msgspec.convert(record, Identity)
        except msgspec.ValidationError as error:
            raise StoreError(f"{path}:{number}: not a record: {error}; {DELETE_LINE}") from None
    if torn:
        warnings.warn(f"{path}:{len(lines) + 1}: dropped a torn last line", stacklevel=2)
    return records


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, then put it there: a full disk leaves what was there before.

    Raises OSError, which names the file, where it cannot be written.
    """
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def warn_in_one_line() -> None:
    """Show warnings without the line of code that raised them."""
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"


def parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """One line as a record; raises StoreError, with file and line, where it is none of this version."""
    if not line.strip():
        raise StoreError(f"{path}:{number}: an empty line; delete it")
    try:
        record = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}:{number}: not a record: {error}; {DELETE_LINE}") from None
    if not isinstance(record, dict):
        raise StoreError(f"{path}:{number}: not a record: a line has to be an object; {DELETE_LINE}")
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path}:{number}: schema_version {shown(version)}, this version reads {SCHEMA_VERSION}; run the"
            " sweep again, or read it with the version that wrote it"
        )
    return dict(record)


def _append_whole(descriptor: int, content: bytes) -> None:
    """Add to the end of a file and wait until it is on the disk; where that is full, add nothing."""
    whole, written = os.fstat(descriptor).st_size, 0
    try:
        while written < len(content):
            written += os.write(descriptor, content[written:])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, whole)
        raise


def _whole_lines_bytes(file: BinaryIO) -> int:
    """Where the last whole line ends, found from the file's end: most of a long file is never read."""
    if file.seek(0, os.SEEK_END) == 0:
        return 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
