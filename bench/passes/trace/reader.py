"""A Chrome trace read piece by piece, whatever its size, and the columns that are kept of it. No torch.

A trace of a gigabyte has four million events: as columns they take some hundred MiB.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from bench.passes.trace.intervals import Spans

Event = Mapping[str, Any]

KEPT_TRACE = "rank_{rank}.trace.json.gz"
"""What a rank leaves in its folder where traces are kept."""
CHUNK_LETTERS = 1 << 22
MAX_EVENT_LETTERS = 1 << 24
"""No event is longer: a file in which one seems to be is broken, and must not be read into memory whole."""
MAX_TRACE_LETTERS = 1 << 32
"""No trace is longer, once unpacked: columns of as many events take a GiB or two. A few MB of gzip may hold
more."""
NOT_WHOLE = (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError)
"""What reading a file raises that is no text, or not all of one."""
NOT_AN_EVENT = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
"""What columns raise of an event that lacks something, or has it of another type."""

TRACKS: Mapping[str, str] = {
    "cpu_op": "operators",
    "user_annotation": "annotations",
    "kernel": "kernels",
    "gpu_memcpy": "copies",
    "gpu_memset": "copies",
    "cuda_runtime": "launches",
    "cuda_driver": "launches",
}
"""Which categories of events are kept, and under which name."""
NCCL_PREFIX = "nccl"

_EVENTS_START = re.compile(r'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")


class TraceError(ValueError):
    """A file that is no Chrome trace, or not a whole one."""


@dataclass(frozen=True, slots=True)
class Track:
    """Events of one kind as columns of equal length; times in microseconds of the trace's own clock.

    `name[i]` is an index into `names`, `correlation` ties a launch to what it launched (-1: nothing),
    `notes` are the arguments of NCCL's kernels by row.
    """

    names: tuple[str, ...]
    name: NDArray[np.int64]
    thread: NDArray[np.int64]
    spans: Spans
    correlation: NDArray[np.int64]
    notes: Mapping[int, Event]

    def __len__(self) -> int:
        return len(self.name)

    def named(self, is_wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which rows have a name that is wanted."""
        wanted = np.array([is_wanted(name) for name in self.names], dtype=np.bool_)
        return wanted[self.name] if len(wanted) else np.zeros(0, dtype=np.bool_)

    def outermost(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the rows that lie in no other of them on their thread, by thread and time."""
        spans, thread = self.spans[rows], self.thread[rows]
        rows = rows[np.lexsort((-spans[:, 1], spans[:, 0], thread))]
        kept = [_not_nested(self.spans, rows[self.thread[rows] == each]) for each in np.unique(thread)]
        return np.concatenate(kept) if kept else rows


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, plain or gzipped, one by one; raises TraceError where it is broken."""
    with _opened(path) as opened:
        file = _Letters(opened, path)
        buffer, at = _to_first_event(file, path)
        decode, skip = json.JSONDecoder().raw_decode, _GAP.match
        while True:
            gap = skip(buffer, at)
            at = gap.end() if gap else at
            if buffer.startswith("]", at):
                return
            try:
                event, at = decode(buffer, at)
            except json.JSONDecodeError:
                more = file.more()
                if not more or len(buffer) - at > MAX_EVENT_LETTERS:
                    raise TraceError(f"{path}: no complete Chrome trace: an event has no end") from None
                buffer, at = buffer[at:] + more, 0
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets as many
                raise TraceError(f"{path}: no Chrome trace: {error}") from None
            else:
                if not isinstance(event, dict):
                    raise TraceError(f"{path}: no Chrome trace: an event is no object")
                yield event


def read_tracks(events: Iterable[Event]) -> dict[str, Track]:
    """The complete events by track; every track of TRACKS is there.

    Raises TraceError for an event that is not as torch's profiler writes it.
    """
    threads: dict[Any, int] = {}
    columns = {track: _Columns(threads) for track in TRACKS.values()}
    for number, event in enumerate(events, start=1):
        if event.get("ph") == "X":
            try:
                track = TRACKS.get(event.get("cat", ""))
                if track is not None:
                    columns[track].add(event)
            except NOT_AN_EVENT as error:
                what = f"{type(error).__name__}: {error}"
                raise TraceError(
                    f"no Chrome trace: event {number} is not as torch writes it: {what}"
                ) from None
    return {track: found.track() for track, found in columns.items()}


class _Columns:
    """A track that grows; threads have the same numbers on all tracks."""

    def __init__(self, threads: dict[Any, int]) -> None:
        self.name_ids: dict[str, int] = {}
        self.thread_ids = threads
        self.name, self.thread, self.correlation = array("q"), array("q"), array("q")
        self.times = array("d")
        self.notes: dict[int, Event] = {}

    def add(self, event: Event) -> None:
        name, start, thread = event["name"], event["ts"], event["tid"]
        arguments = event.get("args", {})
        if name.startswith(NCCL_PREFIX):
            self.notes[len(self.name)] = arguments
        self.name.append(self.name_ids.setdefault(name, len(self.name_ids)))
        self.thread.append(self.thread_ids.setdefault(thread, len(self.thread_ids)))
        self.times.append(start)
        self.times.append(start + event["dur"])
        self.correlation.append(arguments.get("correlation", -1))

    def track(self) -> Track:
        return Track(
            names=tuple(self.name_ids),
            name=np.array(self.name, dtype=np.int64),
            thread=np.array(self.thread, dtype=np.int64),
            spans=np.array(self.times, dtype=np.float64).reshape(-1, 2),
            correlation=np.array(self.correlation, dtype=np.int64),
            notes=self.notes,
        )


class _Letters:
    """A file's text in pieces; raises TraceError where it is none, ends too early or has no end."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path, self._left = file, path, MAX_TRACE_LETTERS

    def more(self) -> str:
        """The next piece; empty at the end."""
        try:
            piece = self._file.read(CHUNK_LETTERS)
        except NOT_WHOLE as error:
            raise TraceError(f"{self._path}: no complete Chrome trace: {error}") from None
        self._left -= len(piece)
        if self._left < 0:
            most = f"{MAX_TRACE_LETTERS:,} letters"
            raise TraceError(f"{self._path}: too long for a Chrome trace: more than {most}")
        return piece


def _opened(path: Path) -> TextIO:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: TextIO = opener(path, "rt", encoding="utf-8", newline="")
    return file


def _to_first_event(file: _Letters, path: Path) -> tuple[str, int]:
    """What has been read so far, and where in it the events begin."""
    buffer = ""
    while len(buffer) < MAX_EVENT_LETTERS:
        found = _EVENTS_START.search(buffer)
        if found is not None:
            return buffer, found.end()
        more = file.more()
        if not more:
            break
        buffer += more
    raise TraceError(f"{path}: no Chrome trace: it has no traceEvents")


def _not_nested(spans: Spans, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of rows in order of their starts, longest first, those that begin after all before have ended."""
    ended = np.maximum.accumulate(spans[rows, 1])
    begins = np.append(True, spans[rows[1:], 0] >= ended[:-1])
    return np.asarray(rows[begins], dtype=np.int64)
