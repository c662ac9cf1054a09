"""`records.jsonl`: one writer, one line a record, on the disk before the next cell starts."""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
from filelock import FileLock, Timeout

from bench.common.finite import finite
from bench.common.labels import shown
from bench.config import ConfigError
from bench.record.record import SCHEMA_VERSION, Record

RECORDS = "records.jsonl"
"""The file's name in a sweep's folder."""
CHECK_PATH = "check the path and its permissions"
DELETE_LINE = "delete the line; its sweep with resume=true runs that cell again"


class StoreError(ValueError):
    """A file of records that cannot be used; the message names file and line."""


class Version(msgspec.Struct):
    """The field of a line that says which types read it."""

    schema_version: Any = None


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
        line = line_of(record)
        try:
            with self.path.open("a+b") as file:
                file.truncate(_whole_lines_bytes(file))
                _append_whole(file.fileno(), line)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), os.fspath(self.path)) from None

    def read(self) -> list[Record]:
        return read_records(self.path) if self.path.exists() else []


def read_records(path: Path) -> list[Record]:
    """Return all records of a file; drop a torn last line with one warning.

    Raises StoreError, which names file and line, for a file that cannot be read and a line that is no record.
    """
    return [record for _, record in placed_records(path)]


def placed_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield each record of a file with its first byte; otherwise as `read_records`."""
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    warnings.warn(f"{path}:{number}: dropped a torn last line", stacklevel=2)
                    return
                yield start, parse_record(path, number, line)
                start += len(line)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error}); {CHECK_PATH}") from None


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


def parse_record(path: Path, number: int, line: bytes) -> Record:
    """Return the record in a line; raises StoreError, with file and line, for a line that is none."""
    if not line.strip():
        raise StoreError(f"{path}:{number}: an empty line; delete it")
    try:
        version = msgspec.json.decode(line, type=Version).schema_version
        if version == SCHEMA_VERSION:
            return msgspec.json.decode(line, type=Record)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}:{number}: not a record: {_flaw(error)}; {DELETE_LINE}") from None
    raise StoreError(
        f"{path}:{number}: schema_version {shown(version)}, this version reads {SCHEMA_VERSION}; run the"
        " sweep again, or read it with the version that wrote it"
    )


def _flaw(error: Exception) -> str:
    """Return what was expected where, from the message of a decoding error."""
    return str(error).removesuffix(" - at `$`").replace(" - at `$.", " at `")


def line_of(record: Record) -> bytes:
    """Return the record as a line of JSON. A number of a section that is not finite becomes null.

    Raises ValueError for any other number that is not finite. Bytes of a path that are not UTF-8 become
    question marks.
    """
    sections = {name: finite(msgspec.to_builtins(each)) for name, each in record.sections.items()}
    values = msgspec.to_builtins(record) | sections
    line = json.dumps(values, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return line.encode(errors="replace") + b"\n"


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
