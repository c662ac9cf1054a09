"""Split traces of torch.profiler into compute, communication and idle: `python -m analysis.trace FILE`."""

from __future__ import annotations

import argparse
import gzip
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from analysis.labels import number_label, table_console
from bench.common.command import outlive_readers, tool_command
from bench.config import ExitCode
from bench.measure.trace.cpu_timeline import COMMUNICATION_PREFIXES
from bench.measure.trace.cuda_timeline import NCCL_PREFIX, device_events
from bench.measure.trace.intervals import Span, Spans, covers, intersect, length, subtract, union
from bench.measure.trace.reader import GPU_TRACKS, TraceError, Track, open_trace, read_events, read_tracks

WINDOW_PREFIX = "ProfilerStep#"
"""Prefix of the annotations of `torch.profiler`'s steps; without any the whole trace is split."""
GLOO_PREFIX = "gloo:"
HEADER_CHARACTERS = 1 << 16
"""Number of characters of a trace in which its metadata, such as the rank, is looked for."""
COLUMNS = (
    *("file", "rank", "window ms", "compute", "communication", "exposed", "exposed %"),
    *("copies", "idle", "waiting"),
)

_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')
_SIZES = re.compile(r'"world_size"\s*:\s*(\d+)\s*,\s*"pg_count"\s*:\s*1\b')
_HOST = re.compile(r'"host_name"\s*:\s*"([^"]+)"')
_LOOKALIKE = re.compile(  # beginnings of names; kernels that compute have such words in the middle
    r"(?:void )?(?:.*(?:namespace\)|<unnamed>)::)?((?:\w+::)*?(?:(?:one|two)_?[sS]hot_?[aA]ll|multimem_|msccl"
    r"|[aA]ll_?(?:[rR]educe|[gG]ather|[tT]o_?[aA]ll)|cross_device_reduce|(?:nv|roc)shmem|deep_ep::)[^<(]*)"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One communication of a rank, from its start to its end."""

    kind: str
    group: str
    """Name and ranks of the process group."""
    size: int | None
    """Number of ranks of the group; None if the trace does not state the group."""
    start_us: float
    end_us: float

    @property
    def is_point_to_point(self) -> bool:
        """Whether this is a send, a receive or a batch of them, at which not all ranks of the group meet."""
        return self.kind.split(" ")[0].rpartition(":")[2] in ("send", "recv", "coalesced")


@dataclass(frozen=True, slots=True)
class TraceSplit:
    """Milliseconds of one GPU; compute, exposed communication, copies and idle add up to `window_ms`."""

    rank: int | None
    host: str | None
    calls: Sequence[Call]
    """Communications in the order in which they started."""
    exposed: Spans
    """Spans of `exposed_ms`, in microseconds of the trace's clock."""
    lookalikes: Sequence[str]
    """Kernels that count as compute and whose names look like communication."""
    window_ms: float
    compute_ms: float
    communication_ms: float
    """Time in which any communication was in flight."""
    exposed_ms: float
    """The part of `communication_ms` in which the rank computed nothing."""
    copies_ms: float
    idle_ms: float
    outside_steps_ms: float
    lookalikes_ms: float


def split_trace(path: Path) -> dict[str, TraceSplit]:
    """Return the splits of a Chrome trace by row: of every GPU, or of every process if it has no kernels.

    Raises:
        TraceError: The file is no trace of torch.profiler, or the trace has no operator and no kernel.
        OSError: The file cannot be read.
    """
    try:
        with open_trace(path) as file:
            header = file.read(HEADER_CHARACTERS)
        rank, host, sizes = (pattern.search(header) for pattern in (_RANK, _HOST, _SIZES))
        calls: list[Call] = []
        world_size = int(sizes[1]) if sizes else None  # gloo's events do not name their group
        tracks = read_tracks(_collect_calls(read_events(path), calls, world_size))
    except TraceError:
        raise
    except EOFError:
        raise TraceError(f"{path} is cut off") from None
    except (gzip.BadGzipFile, zlib.error, LookupError, TypeError, AttributeError, ValueError, OverflowError):
        raise TraceError(f"{path} is not a Chrome trace of torch.profiler") from None
    if not len(tracks["operators"]) and not len(tracks["kernels"]):
        raise TraceError(f"{path} has no operator and no kernel; trace at least one step")
    if len(parts := _parts(tracks)) > 1:  # the metadata of merged files are those of one rank
        return {f"{path.name} {name}": _split(part, None, None, []) for name, part in parts.items()}
    calls.sort(key=lambda call: call.start_us)
    names = int(rank[1]) if rank else None, host[1] if host else None
    return {path.name: _split(tracks, *names, calls)}


def _parts(tracks: dict[str, Track]) -> dict[str, dict[str, Track]]:
    """Return the tracks by GPU, or by process without kernels; merged files keep both in the same order."""
    hosts, gpus = (
        [*dict.fromkeys(track.threads[number][:2] for number in np.unique(track.thread))]
        for track in (tracks["operators"], tracks["kernels"])
    )
    numbered = {process for process, gpu in gpus if gpu is not None}
    gpus = [key for key in gpus if key[1] is not None or key[0] not in numbered]
    if len(gpus or hosts) == 1:
        return {"": tracks}
    parts = {}
    for number, (process, gpu) in enumerate(gpus or hosts):
        on_host = hosts[number : number + 1] if len(hosts) == len(gpus or hosts) else hosts
        on_gpu = [(process, gpu), (process, None)]  # annotations on a GPU do not name it
        name = f"process {process}" if gpu is None else f"process {process}, GPU {gpu}"
        parts[name] = {
            key: _of_processes(track, on_gpu if key in GPU_TRACKS else on_host)
            for key, track in tracks.items()
        }
    return parts


def _of_processes(track: Track, processes: Sequence[tuple[Any, Any]]) -> Track:
    rows = np.array([thread[:2] in processes for thread in track.threads], dtype=np.bool_)[track.thread]
    columns = track.name_index[rows], track.thread[rows], track.spans[rows], track.correlation[rows]
    return Track(track.names, *columns, track.threads)


def _split(tracks: dict[str, Track], rank: int | None, host: str | None, calls: Sequence[Call]) -> TraceSplit:
    """Return the split of the tracks of one GPU or process."""
    kernels, window = tracks["kernels"], _window(tracks)
    nccl = kernels.name_mask(lambda name: name.startswith(NCCL_PREFIX))
    by_kernels = kernels.spans[~nccl], kernels.spans[nccl]
    compute, communication = by_kernels if len(kernels) else _cpu_spans(tracks)
    compute, communication, copies = (
        intersect(spans, window) for spans in (compute, communication, tracks["copies"].spans)
    )
    exposed = subtract(communication, compute)
    busy = np.concatenate([compute, exposed])
    idle = subtract(window, np.concatenate([busy, copies]))
    outside = subtract(kernels.spans, window)
    is_lookalike = kernels.name_mask(lambda name: bool(_LOOKALIKE.match(name)))
    lookalikes = intersect(kernels.spans[is_lookalike], window)
    lengths_us = (window, compute, communication, exposed, subtract(copies, busy), idle, outside, lookalikes)
    names = [match[1] for name in kernels.names if (match := _LOOKALIKE.match(name))]
    return TraceSplit(rank, host, calls, exposed, names, *(length(spans) / 1e3 for spans in lengths_us))


def _collect_calls(
    events: Iterable[dict[str, Any]], calls: list[Call], world_size: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the events, and append the communications among them to `calls`."""
    for event in events:
        name, category = event.get("name", ""), event.get("cat")
        is_nccl = category == "kernel" and name.startswith(NCCL_PREFIX)
        if is_nccl or (category == "user_annotation" and name.startswith(GLOO_PREFIX)):
            kind, group, size = name, "world", world_size
            if is_nccl:
                args = event.get("args", {})
                group = f"{args.get('Process Group Name')} {args.get('Process Group Ranks')}"
                kind, size = args.get("Collective name", name), args.get("Group size")
            calls.append(Call(kind, group, size, event["ts"], event["ts"] + event["dur"]))
        yield event


Rendezvous = Mapping[tuple[str, str, int], Sequence[tuple[int, Call]]]
"""Calls of one collective with the positions of their traces, by kind, process group and number."""


def exposed_waiting_ms(splits: Sequence[TraceSplit]) -> list[float] | str:
    """Return the exposed waiting of every rank at collectives, or the reason why it is unknown.

    A rank waits from the start of a collective until the last rank starts it, and at most until its end.
    Calls of the same kind and process group are matched in their order.
    """
    rendezvous = _match_calls(splits)
    if (reason := _unknown_waiting(splits, rendezvous)) is not None:
        return reason
    spans: list[list[Span]] = [[] for _ in splits]
    for calls in rendezvous.values():
        last_us = max(call.start_us for _, call in calls)
        for position, call in calls:
            spans[position].append((call.start_us, min(last_us, call.end_us)))
    return [length(intersect(waits, split.exposed)) / 1e3 for waits, split in zip(spans, splits, strict=True)]


def _match_calls(splits: Sequence[TraceSplit]) -> Rendezvous:
    """Return the calls of all traces by collective, without sends and receives."""
    rendezvous = defaultdict(list)
    for position, split in enumerate(splits):
        counts: Counter[tuple[str, str]] = Counter()
        for call in split.calls:
            if not call.is_point_to_point:
                key = call.kind, call.group
                rendezvous[*key, counts[key]].append((position, call))
                counts[key] += 1
    return rendezvous


def _unknown_waiting(splits: Sequence[TraceSplit], rendezvous: Rendezvous) -> str | None:
    """Return the reason why waiting is unknown; None if it is known."""
    hosts = {split.host for split in splits}
    if None in hosts or len(hosts) > 1:
        return "the traces do not name one and the same host, and clocks of several hosts are not comparable"
    if len({split.rank for split in splits}) < len(splits):
        return "several traces have the same rank"
    for (kind, group, number), calls in rendezvous.items():
        size = calls[0][1].size
        if size is None:
            return f"the traces do not state the process group of {kind}"
        if len(calls) != size:
            return (
                f"{kind} number {number} of group {group} is in {len(calls)} of {size} ranks' traces;"
                " give those of all ranks, of the same steps"
            )
    return None


def _window(tracks: dict[str, Track]) -> Spans:
    """Return the steps from the end of earlier kernels to that of their own, or the span of all events."""
    steps, gpu_steps = (
        union(track.spans[track.name_mask(lambda name: name.startswith(WINDOW_PREFIX))])
        for track in (tracks["annotations"], tracks["gpu_annotations"])
    )
    if not len(steps) + len(gpu_steps):
        spans = np.concatenate([track.spans for track in tracks.values()])
        return np.array([[spans[:, 0].min(), spans[:, 1].max()]])
    kernels = device_events(tracks["kernels"], tracks["launches"])
    has_launch = kernels.launch_row >= 0  # others belong to the step in which they start, or that of the GPU
    is_own = covers(steps, kernels.launched_us) & (has_launch | (len(gpu_steps) == 0))
    own = np.concatenate([kernels.spans[is_own], gpu_steps])
    is_earlier = kernels.spans[:, 1] <= (own[:, 0].min() if len(own) else -np.inf)
    until_end = np.stack([kernels.launched_us, kernels.spans[:, 1]], axis=1)[is_own]
    start = kernels.spans[is_earlier].max(initial=-np.inf)
    return subtract(np.concatenate([steps, until_end, gpu_steps]), [(-np.inf, start)])


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
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="trace, .json or .json.gz")
    files = parser.parse_args(arguments).files
    try:
        rows = [row for path in files for row in split_trace(path).items()]
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_REQUEST
    splits = [split for _, split in rows]
    waiting = exposed_waiting_ms(splits)
    known = [""] * len(splits) if isinstance(waiting, str) else [f"{ms:.1f}" for ms in waiting]
    table = Table(*COLUMNS, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for (name, split), waited in zip(rows, known, strict=True):
        table.add_row(name, *_texts(split), waited)
    table_console().print(table)
    if isinstance(waiting, str) and len(splits) > 1:
        print(f"Waiting is unknown: {waiting}.")
    elif any(call.is_point_to_point for split in splits for call in split.calls):
        print("Waiting is that at collectives, without sends and receives.")
    if outside_ms := round(sum(split.outside_steps_ms for split in splits), 2):
        print(f"{number_label(outside_ms)} ms of kernels ran outside the steps and do not count.")
    if ms := round(sum(split.lookalikes_ms for split in splits), 2):
        names = ", ".join(sorted({name for split in splits for name in split.lookalikes}))
        names = names.encode(errors="replace").decode()  # JSON can hold half a surrogate pair
        print(f"Communication does not include {number_label(ms)} ms of kernels that look like it: {names}.")
    return ExitCode.OK


def _texts(split: TraceSplit) -> list[str]:
    """Return the texts of a row without its file."""
    times = (split.window_ms, split.compute_ms, split.communication_ms, split.exposed_ms, split.copies_ms)
    texts = [number_label(ms) or "" for ms in (*times, split.idle_ms)]
    share = f"{100 * split.exposed_ms / split.window_ms:.1f}" if split.window_ms else ""
    return ["?" if split.rank is None else str(split.rank), *texts[:4], share, *texts[4:]]


if __name__ == "__main__":
    sys.exit(main())
