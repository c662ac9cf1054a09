"""A Chrome trace of torch's profiler read piece by piece, and the columns that are kept of it. No torch.

A trace of a gigabyte has four million events: as columns they take some hundred MiB.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure.trace.intervals import Spans

Event = Mapping[str, Any]

KEPT_TRACE = "rank_{rank}.trace.json.gz"
"""What a rank leaves in its folder where traces are kept."""
CHUNK_LETTERS = 1 << 22

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

_EVENTS_START = re.compile(r'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")


class TraceError(ValueError):
    """A file that is no Chrome trace, or not a whole one."""


@dataclass(frozen=True, slots=True)
class Track:
    """Events of one kind as columns of equal length; times in microseconds of the trace's own clock.

    `name[i]` is an index into `names`, `correlation` ties a launch to what it launched (-1: nothing).
    """

    names: tuple[str, ...]
    name: NDArray[np.int64]
    thread: NDArray[np.int64]
    spans: Spans
    correlation: NDArray[np.int64]

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
    """The events of a Chrome trace, one by one; raises TraceError where it is not whole."""
    decode = json.JSONDecoder().raw_decode
    with path.open(encoding="utf-8") as file:
        buffer = file.read(CHUNK_LETTERS)
        start = _EVENTS_START.search(buffer)
        if start is None:
            raise TraceError(f"{path}: no Chrome trace: it has no traceEvents")
        at = start.end()
        while True:
            gap = _GAP.match(buffer, at)
            at = gap.end() if gap else at
            if buffer.startswith("]", at):
                return
            try:
                event, at = decode(buffer, at)
            except json.JSONDecodeError:
                more = file.read(CHUNK_LETTERS)
                if not more:
                    raise TraceError(f"{path}: no complete Chrome trace: an event has no end") from None
                buffer, at = buffer[at:] + more, 0
            else:
                yield event


def read_tracks(events: Iterable[Event]) -> dict[str, Track]:
    """The complete events by track; every track of TRACKS is there."""
    threads: dict[Any, int] = {}
    columns = {track: _Columns(threads) for track in TRACKS.values()}
    for event in events:
        track = TRACKS.get(event.get("cat", ""))
        if track is not None and event["ph"] == "X":
            columns[track].add(event)
    return {track: found.track() for track, found in columns.items()}


class _Columns:
    """A track that grows; threads have the same numbers on all tracks."""

    def __init__(self, threads: dict[Any, int]) -> None:
        self.name_ids: dict[str, int] = {}
        self.thread_ids = threads
        self.name, self.thread, self.correlation = array("q"), array("q"), array("q")
        self.times = array("d")

    def add(self, event: Event) -> None:
        name, start, thread = event["name"], event["ts"], event["tid"]
        self.name.append(self.name_ids.setdefault(name, len(self.name_ids)))
        self.thread.append(self.thread_ids.setdefault(thread, len(self.thread_ids)))
        self.times.append(start)
        self.times.append(start + event["dur"])
        self.correlation.append(event.get("args", {}).get("correlation", -1))

    def track(self) -> Track:
        return Track(
            names=tuple(self.name_ids),
            name=np.array(self.name, dtype=np.int64),
            thread=np.array(self.thread, dtype=np.int64),
            spans=np.array(self.times, dtype=np.float64).reshape(-1, 2),
            correlation=np.array(self.correlation, dtype=np.int64),
        )


def _not_nested(spans: Spans, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of rows in order of their starts, longest first, those that begin after all before have ended."""
    ended = np.maximum.accumulate(spans[rows, 1])
    begins = np.append(True, spans[rows[1:], 0] >= ended[:-1])
    return np.asarray(rows[begins], dtype=np.int64)
