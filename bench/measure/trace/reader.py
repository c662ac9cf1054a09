"""Streaming reader of Chrome traces of torch.profiler, which keeps the events as NumPy columns. No torch.

A trace of one gigabyte has four million events. Their columns take a few hundred MiB.
"""

from __future__ import annotations

import gzip
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from bench.measure.trace.intervals import Spans

Event = Mapping[str, Any]

KEPT_TRACE_NAME = "rank_{rank}.trace.json.gz"
"""File name of the trace that a rank stores in its folder with `measure.keep_traces=true`."""
CHUNK_CHARACTERS = 1 << 22
"""Number of characters that the reader takes from the file at a time."""

TRACKS: Mapping[str, str] = {
    "cpu_op": "operators",
    "user_annotation": "annotations",
    "kernel": "kernels",
    "gpu_memcpy": "copies",
    "gpu_memset": "copies",
    "gpu_user_annotation": "gpu_annotations",
    "cuda_runtime": "launches",
    "cuda_driver": "launches",
}
"""Name of the track for each Kineto category that the reader keeps; other categories are dropped."""
GPU_TRACKS = ("kernels", "copies", "gpu_annotations")

_EVENTS_START = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[(?=\s*\{)')
_GAP = re.compile(r"[\s,]*")
_CUT_OFF = re.compile(r"[-+.\w\\]*\s*\Z")  # the text ends within a number, a word or an escape sequence


class TraceError(ValueError):
    """A file that is not a complete Chrome trace, or a trace that lacks events every step has."""


@dataclass(frozen=True, slots=True)
class Track:
    """Columns of the events of one track, all of equal length.

    Times are microseconds of the trace's own clock.
    """

    names: tuple[str, ...]
    """Distinct names of the events."""
    name_index: NDArray[np.int64]
    """Index into `names` of each event."""
    thread: NDArray[np.int64]
    """Number of the host thread or CUDA stream of each event; all tracks of a trace share the numbers."""
    spans: Spans
    """Start and end of each event, [n, 2]."""
    correlation: NDArray[np.int64]
    """Kineto's correlation ID, which a launch shares with the kernel or copy it launched; -1 without one."""
    threads: tuple[tuple[Any, Any, Any], ...]
    """Process ID, GPU (None on the host) and thread ID by number, in the order of their first events."""

    def __len__(self) -> int:
        return len(self.name_index)

    def name_mask(self, is_wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return a mask of the events whose name satisfies `is_wanted`."""
        wanted: NDArray[np.bool_] = np.array([is_wanted(name) for name in self.names], dtype=np.bool_)
        return wanted[self.name_index]

    def outermost(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of `rows` not nested in another of them on their thread, by thread and start."""
        spans, thread = self.spans[rows], self.thread[rows]
        rows = rows[np.lexsort((-spans[:, 1], spans[:, 0], thread))]
        by_thread = [
            _without_nested(self.spans, rows[self.thread[rows] == number]) for number in np.unique(thread)
        ]
        return np.concatenate(by_thread) if by_thread else rows


def open_trace(path: Path) -> TextIO:
    """Open a trace as text, compressed with gzip or not; bytes that are not UTF-8 are replaced."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace one by one.

    Raises:
        TraceError: The file has no `traceEvents`, ends within them, or is not JSON there.
    """
    decode = json.JSONDecoder(strict=False).raw_decode
    with open_trace(path) as file:
        buffer = file.read(CHUNK_CHARACTERS)
        start = _EVENTS_START.search(buffer)
        if start is None:
            raise TraceError(f"{path} is not a Chrome trace: it has no traceEvents")
        at, n_lines, n_characters = start.end(), 0, 0
        while True:
            gap = _GAP.match(buffer, at)
            at = gap.end() if gap else at
            if buffer.startswith("]", at):
                return
            try:
                event, at = decode(buffer, at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or _CUT_OFF.match(buffer, error.pos)
                more = file.read(CHUNK_CHARACTERS) if is_cut else ""
                if not more:
                    fault = "cut off" if is_cut else f"not JSON from {buffer[error.pos :][:20]!r} on,"
                    place = f"line {n_lines + error.lineno}, character {n_characters + error.pos + 1}"
                    raise TraceError(f"{path} is {fault} in {place} of the file") from None
                n_lines, n_characters = n_lines + buffer.count("\n", 0, at), n_characters + at
                buffer, at = buffer[at:] + more, 0
            else:
                yield event


def read_tracks(events: Iterable[Event]) -> dict[str, Track]:
    """Return every track of TRACKS with its complete events ("ph": "X"); a track may be empty."""
    thread_ids: dict[tuple[Any, Any, Any], int] = {}
    builders = {track: _TrackBuilder(thread_ids, track in GPU_TRACKS) for track in TRACKS.values()}
    for event in events:
        track = TRACKS.get(event.get("cat", ""))
        if track is not None and event["ph"] == "X":
            builders[track].add(event)
    return {track: builder.build() for track, builder in builders.items()}


class _TrackBuilder:
    """Columns of one track while the trace is read; `thread_ids` is shared by all tracks."""

    def __init__(self, thread_ids: dict[tuple[Any, Any, Any], int], is_gpu: bool) -> None:
        self.name_ids: dict[str, int] = {}
        self.thread_ids, self.is_gpu = thread_ids, is_gpu
        self.name_index, self.thread, self.correlation = array("q"), array("q"), array("q")
        self.times = array("d")

    def add(self, event: Event) -> None:
        name, start, args = event["name"], event["ts"], event.get("args", {})
        thread = event.get("pid"), args.get("device") if self.is_gpu else None, event["tid"]
        self.name_index.append(self.name_ids.setdefault(name, len(self.name_ids)))
        self.thread.append(self.thread_ids.setdefault(thread, len(self.thread_ids)))
        self.times.append(start)
        self.times.append(start + event["dur"])
        self.correlation.append(args.get("correlation", -1))

    def build(self) -> Track:
        columns = np.array(self.name_index), np.array(self.thread), np.array(self.times).reshape(-1, 2)
        return Track(tuple(self.name_ids), *columns, np.array(self.correlation), tuple(self.thread_ids))


def _without_nested(spans: Spans, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows that start when all earlier rows have ended.

    `rows` must be sorted by start, and by falling end where starts are equal.
    """
    ended = np.maximum.accumulate(spans[rows, 1])
    is_outermost = np.append(True, spans[rows[1:], 0] >= ended[:-1])
    return np.asarray(rows[is_outermost], dtype=np.int64)
