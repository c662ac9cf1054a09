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
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Functions of torch that return the flight recorder's calls as JSON, by backend."""
Spans = Sequence[tuple[int, int]]
"""Start and end of each span, in order of time."""


class RecordedCall(NamedTuple):
    """One call, with the time at which it was made, by `time.time_ns`."""

    made_ns: int
    what: str
    """Kind, sizes and group of the call, equal for calls that send equally much to the same ranks."""


class CallLog(NamedTuple):
    """Calls that this rank has made, in order of time."""

    calls: Sequence[RecordedCall]
    complete_from_ns: int
    """Time from which no call is missing."""

    def by_span(self, spans: Spans) -> list[Counter[str] | None]:
        """Return the number of calls of each kind in each span; None for a span with missing calls."""
        times = [call.made_ns for call in self.calls]
        return [
            None
            if start < self.complete_from_ns
            else Counter(
                call.what for call in self.calls[bisect_right(times, start) : bisect_right(times, end)]
            )
            for start, end in spans
        ]


def read_call_log(sends: Sequence[RecordedCall]) -> CallLog:
    """Return the calls that the flight recorder still has, and `sends`."""
    dump = getattr(_distributed_c10d, DUMPS.get(dist.get_backend(), ""), None)
    entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", []) if dump else []
    calls = [RecordedCall(entry["time_created_ns"], _description(entry)) for entry in entries]
    is_complete = not entries or entries[0]["record_id"] == 0
    return CallLog(sorted([*calls, *sends]), 0 if is_complete else calls[0].made_ns)


def _description(entry: dict[str, Any]) -> str:
    kind = entry["profiling_name"].partition(":")[2]
    (group, _), sizes = (
        entry["process_group"],
        [*zip(entry["input_sizes"], entry["input_dtypes"], strict=False)],
    )
    return f"{kind} of {sizes} in group {group}"


@contextmanager
def recorded_sends() -> Iterator[list[RecordedCall]]:
    """Yield a list that receives every send over gloo in this context, which costs about a microsecond."""
    sends: list[RecordedCall] = []
    if dist.get_backend() != "gloo":
        yield sends
        return
    plain = dist.ProcessGroup.send

    def send(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
        sends.append(
            RecordedCall(time.time_ns(), f"send of {tensors[0].nbytes} bytes in group {group.group_name}")
        )
        return plain(group, tensors, *args)

    dist.ProcessGroup.send = send  # type: ignore[method-assign, assignment]
    try:
        yield sends
    finally:
        dist.ProcessGroup.send = plain  # type: ignore[method-assign]
