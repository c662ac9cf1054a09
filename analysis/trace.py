"""Split traces of torch.profiler into compute, communication and idle: `python -m analysis.trace FILE`."""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from analysis.labels import number_label, table_console
from bench.common.command import outlive_readers, tool_command
from bench.config import ExitCode
from bench.measure.trace.cpu_timeline import COMMUNICATION_PREFIXES
from bench.measure.trace.cuda_timeline import NCCL_PREFIX
from bench.measure.trace.intervals import Spans, intersect, length, subtract, union
from bench.measure.trace.reader import TraceError, Track, open_trace, read_events, read_tracks

WINDOW_PREFIX = "ProfilerStep#"
"""Prefix of the annotations of `torch.profiler`'s steps; without any the whole trace is split."""
GLOO_PREFIX = "gloo:"
HEADER_CHARACTERS = 1 << 16
"""Number of characters of a trace in which its metadata, such as the rank, is looked for."""
COLUMNS = ("file", "rank", "window ms", "compute", "communication", "exposed", "exposed %", "copies", "idle")

_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')


@dataclass(frozen=True, slots=True)
class TraceSplit:
    """Milliseconds of one trace; compute, exposed communication, copies and idle add up to `window_ms`."""

    rank: int | None
    """Rank in the trace's metadata; None if not recorded."""
    window_ms: float
    compute_ms: float
    communication_ms: float
    """Time in which any communication was in flight."""
    exposed_ms: float
    """The part of `communication_ms` in which the rank computed nothing."""
    copies_ms: float
    idle_ms: float


def split_trace(path: Path) -> TraceSplit:
    """Return the split of a Chrome trace.

    Raises:
        TraceError: The file is no trace of torch.profiler, or the trace has no operator and no kernel.
        OSError: The file cannot be read.
    """
    try:
        with open_trace(path) as file:
            rank = _RANK.search(file.read(HEADER_CHARACTERS))
        tracks = read_tracks(read_events(path))
    except (UnicodeDecodeError, EOFError, zlib.error, KeyError, TypeError, AttributeError):
        raise TraceError(f"{path} is not a Chrome trace of torch.profiler") from None
    if not len(tracks["operators"]) and not len(tracks["kernels"]):
        raise TraceError(f"{path} has no operator and no kernel; trace at least one step")
    window = _window(tracks)
    compute, communication = _gpu_spans(tracks) if len(tracks["kernels"]) else _cpu_spans(tracks)
    compute, communication, copies = (
        intersect(spans, window) for spans in (compute, communication, tracks["copies"].spans)
    )
    exposed = subtract(communication, compute)
    busy = np.concatenate([compute, exposed])
    lengths_us = (window, compute, communication, exposed, subtract(copies, busy))
    times = [length(spans) / 1e3 for spans in (*lengths_us, subtract(window, np.concatenate([busy, copies])))]
    return TraceSplit(int(rank[1]) if rank else None, *times)


def _window(tracks: dict[str, Track]) -> Spans:
    """Return the profiler's steps, or the span from the first event to the last if the trace has none."""
    annotations = tracks["annotations"]
    steps = annotations.spans[annotations.name_mask(lambda name: name.startswith(WINDOW_PREFIX))]
    if len(steps):
        return union(steps)
    spans = np.concatenate([track.spans for track in tracks.values()])
    return np.array([[spans[:, 0].min(), spans[:, 1].max()]])


def _gpu_spans(tracks: dict[str, Track]) -> tuple[Spans, Spans]:
    """Return the spans of kernels that compute and of NCCL's kernels."""
    kernels = tracks["kernels"]
    is_nccl = kernels.name_mask(lambda name: name.startswith(NCCL_PREFIX))
    return kernels.spans[~is_nccl], kernels.spans[is_nccl]


def _cpu_spans(tracks: dict[str, Track]) -> tuple[Spans, Spans]:
    """Return the spans of compute operators, less communication calls inside them, and of gloo's events.

    Compute is that of the thread with most `aten::` operators; copies on gloo's threads are communication.
    """
    operators, annotations = tracks["operators"], tracks["annotations"]
    is_compute = operators.name_mask(lambda name: name.startswith("aten::"))
    gloo = annotations.spans[annotations.name_mask(lambda name: name.startswith(GLOO_PREFIX))]
    threads = operators.thread[is_compute]
    main_thread = np.bincount(threads).argmax() if len(threads) else -1
    compute = operators.spans[is_compute & (operators.thread == main_thread)]
    calls = operators.spans[operators.name_mask(lambda name: name.startswith(COMMUNICATION_PREFIXES))]
    return subtract(compute, calls), gloo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog=tool_command("analysis.trace"), description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="trace of one rank, .json or .json.gz"
    )
    files = parser.parse_args(arguments).files
    try:
        splits = [split_trace(path) for path in files]
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_REQUEST
    table = Table(*COLUMNS, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for path, split in zip(files, splits, strict=True):
        table.add_row(path.name, *_texts(split))
    table_console().print(table)
    return ExitCode.OK


def _texts(split: TraceSplit) -> list[str]:
    """Return the texts of a row without its file."""
    times = (split.window_ms, split.compute_ms, split.communication_ms, split.exposed_ms)
    share = f"{100 * split.exposed_ms / split.window_ms:.1f}" if split.window_ms else ""
    before, after = (
        [number_label(ms) or "" for ms in part] for part in (times, (split.copies_ms, split.idle_ms))
    )
    return ["?" if split.rank is None else str(split.rank), *before, share, *after]


if __name__ == "__main__":
    sys.exit(main())
