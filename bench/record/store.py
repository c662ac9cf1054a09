"""Reading and writing of `records.jsonl`, which has one line for each record and one writer at a time."""

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

from bench.common.finite import replace_not_finite
from bench.common.labels import value_label
from bench.config import ConfigError
from bench.record.record import SCHEMA_VERSION, Record

RECORDS = "records.jsonl"
"""Name of the file with the records in a sweep's folder."""
CHECK_PATH = "check the path and its permissions"
DELETE_LINE = "delete the line; its sweep with resume=true runs that cell again"


class StoreError(ValueError):
    """A file of records that cannot be read. The message names the file and the line."""


class SchemaVersion(msgspec.Struct):
    """Schema version of a stored record, decoded alone to find out whether the whole line can be decoded."""

    schema_version: Any = None


class Store:
    """Records in the folder of a sweep, which the store locks for one writer while its context is entered.

    Entering creates the folder. Leaving removes it again if it is new and still empty.
    """

    def __init__(self, folder: Path, wait_s: float = 0.0, option: str = "sweep_dir") -> None:
        """Store the settings without reading or writing anything.

        Args:
            folder: Folder of the sweep.
            wait_s: Seconds to wait for another writer before the context raises ConfigError.
            option: Name of the user's option that chose the folder.
        """
        self.folder = folder
        self.wait_s = wait_s
        self.option = option
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
                f"{self.option}={self.folder}: another process is writing here; wait for it or name another"
                " folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{self.option}={self.folder}: cannot be written to ({error.strerror or error}); name another"
                " folder"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)
        if self._is_new:
            with suppress(OSError):  # not empty: there are records
                self.folder.rmdir()

    def append(self, record: Record) -> None:
        """Append a record and wait until it is on the disk. An incomplete last line is cut off first.

        Raises:
            OSError: If the file cannot be written. The error names the file, which keeps its earlier records.
            ValueError: If a number outside of the sections is not finite.
        """
        line = line_of(record)
        try:
            with self.path.open("a+b") as file:
                file.truncate(_whole_lines_bytes(file))
                _append_whole(file.fileno(), line)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), os.fspath(self.path)) from None

    def read(self) -> list[Record]:
        """Return all records of the folder."""
        return read_records(self.path) if self.path.exists() else []


def read_records(path: str | Path) -> list[Record]:
    """Read the records of a sweep.

        records = bench.read_records("results/sweeps/NAME/records.jsonl")
        {record.config["strategy"]: record.status.value for record in records}

    A last line without a line end is the rest of an interrupted write. It is dropped with a warning.

    Args:
        path: A file `records.jsonl`.

    Returns:
        The records in the order in which their cells ended.

    Raises:
        StoreError: If the file cannot be read, or a line is not a record of this schema version. The message
            names the file and the line.
    """
    return [record for _, record in records_with_offsets(Path(path))]


def records_with_offsets(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the offset of each record's first byte in a file, and the record; see `read_records`."""
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


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: write a temporary file in its folder, then rename it.

    Raises:
        OSError: If the file cannot be written, for example on a full disk. The error names the file, whose
            earlier content stays.
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
    """Return the record in a line. The file's path and the line's number are for the message of an error.

    Raises:
        StoreError: If the line is not a record of this schema version.
    """
    if not line.strip():
        raise StoreError(f"{path}:{number}: an empty line; delete it")
    try:
        version = msgspec.json.decode(line, type=SchemaVersion).schema_version
        if version == SCHEMA_VERSION:
            return msgspec.json.decode(line, type=Record)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}:{number}: not a record: {_flaw(error)}; {DELETE_LINE}") from None
    raise StoreError(
        f"{path}:{number}: schema_version {value_label(version)}, this version reads {SCHEMA_VERSION}; run"
        " the sweep again, or read it with the version that wrote it"
    )


def _flaw(error: Exception) -> str:
    """Return the message of a decoding error with a shorter path to the wrong value."""
    return str(error).removesuffix(" - at `$`").replace(" - at `$.", " at `")


def line_of(record: Record) -> bytes:
    """Return a record as a line of JSON.

    Numbers in sections that are not finite become null. Bytes of a path that are not UTF-8 become question
    marks.

    Raises:
        ValueError: If a number outside of the sections is not finite.
    """
    sections = {
        name: replace_not_finite(msgspec.to_builtins(section)) for name, section in record.sections.items()
    }
    values = msgspec.to_builtins(record) | sections
    line = json.dumps(values, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return line.encode(errors="replace") + b"\n"


def _append_whole(descriptor: int, content: bytes) -> None:
    """Append to a file and wait until the content is on the disk; append nothing if the disk is full."""
    size_before, written = os.fstat(descriptor).st_size, 0
    try:
        while written < len(content):
            written += os.write(descriptor, content[written:])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size_before)
        raise


def _whole_lines_bytes(file: BinaryIO) -> int:
    """Return the size of a file up to the end of its last complete line, searching from the end."""
    if file.seek(0, os.SEEK_END) == 0:
        return 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
