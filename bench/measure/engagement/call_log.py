"""Communication calls of a rank as torch's flight recorder keeps them, so that no step needs an instrument.

The recorder is on by default and keeps the last calls, 2,000 unless TORCH_FR_BUFFER_SIZE says otherwise. It
keeps no sends over gloo; `recorded_sends` records them.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Functions of torch that return the flight recorder's calls as JSON, by backend."""
Spans = Sequence[tuple[int, int]]
"""Start and end of each span, by `time.time_ns`."""
RecordedCall = tuple[int, str]
"""Time of a call, by `time.time_ns`, and its kind, sizes and group."""


def calls_by_span(spans: Spans, sends: Sequence[RecordedCall]) -> list[Counter[str] | None]:
    """Return the number of calls of each kind in each span; None if the recorder has not kept all of them."""
    dump = getattr(_distributed_c10d, DUMPS.get(dist.get_backend(), ""), None)
    entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", []) if dump else []
    calls = sorted([*((entry["time_created_ns"], _description(entry)) for entry in entries), *sends])
    complete_from_ns = entries[0]["time_created_ns"] if entries and entries[0]["record_id"] > 0 else 0
    times = [made_ns for made_ns, _ in calls]

    def count(start: int, end: int) -> Counter[str] | None:
        if start < complete_from_ns:
            return None
        return Counter(what for _, what in calls[bisect_right(times, start) : bisect_right(times, end)])

    return [count(*span) for span in spans]


def wall_clock_offset_ns() -> int:
    """Return the time that the recorder's clock is ahead of the monotonic clock."""
    return time.time_ns() - time.monotonic_ns()


def _description(entry: dict[str, Any]) -> str:
    kind, group = entry["profiling_name"].partition(":")[2], entry["process_group"][0]
    return f"{kind} of {entry['input_sizes']} {entry['input_dtypes']} in group {group}"


@contextmanager
def recorded_sends() -> Iterator[list[RecordedCall]]:
    """Yield a list that receives every send over gloo in this context, which costs about a microsecond."""
    sends: list[RecordedCall] = []
    if dist.get_backend() != "gloo":
        yield sends
        return
    method, plain = vars(dist.ProcessGroup)["send"], dist.ProcessGroup.send  # only `method` binds an instance

    def send(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
        sends.append((time.time_ns(), f"send of {tensors[0].nbytes} bytes in group {group.group_name}"))
        return plain(group, tensors, *args)

    dist.ProcessGroup.send = send  # type: ignore[method-assign, assignment]
    try:
        yield sends
    finally:
        dist.ProcessGroup.send = method  # type: ignore[method-assign]
