"""What a cell's page says of memory and of the machine: peaks and their phases, a failed allocation, load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.labels import bytes_label

THROTTLED: Mapping[str, str] = {"True": "yes", "False": "no"}


def memory_facts(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Names and texts for one record; None where it does not say."""
    memory, telemetry = record.get("memory") or {}, record.get("telemetry") or {}
    failed = (record.get("failure") or {}).get("out_of_memory") or {}
    load, switches = telemetry.get("load_average"), telemetry.get("involuntary_switches")
    return {
        "asked for when memory ran out": bytes_label(failed.get("requested_bytes")),
        "held by the rank then": bytes_label(failed.get("held_bytes")),
        "memory limit": bytes_label(failed.get("limit_bytes")),
        "steady peak, by rank": _peaks(memory.get("peak_allocated_bytes"), memory.get("peak_phase")),
        "peak over the whole life, by rank": _peaks(
            memory.get("whole_life_allocated_bytes"), memory.get("whole_life_phase")
        ),
        "device memory used": _sizes(memory.get("device_used_bytes")) or memory.get("device_used_reason"),
        "throttled": THROTTLED.get(str(telemetry.get("throttled"))),
        "telemetry": telemetry.get("reason"),
        "load average when timing began": None if load is None else f"{load:.2f}",
        "involuntary context switches while timed, by rank": ", ".join(map(str, switches or ())),
    }


def largest_blocks(failure: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The classes of live blocks behind a failed allocation: role, dtype, shape, how many, bytes together."""
    return [
        (
            str(block["role"]),
            str(block["dtype"]),
            " x ".join(map(str, block["shape"])) or "scalar",
            f"{block['count']:,}",
            bytes_label(block["total_bytes"]),
        )
        for block in (failure.get("out_of_memory") or {}).get("largest", ())
    ]


def _peaks(sizes: Sequence[int] | None, phases: Sequence[str | None] | None) -> str | None:
    """`27 MiB in backward, 27 MiB in backward`."""
    if not sizes:
        return None
    named = phases or [None] * len(sizes)
    return ", ".join(
        f"{bytes_label(size)} in {phase}" if phase else bytes_label(size)
        for size, phase in zip(sizes, named, strict=True)
    )


def _sizes(sizes: Sequence[int] | None) -> str | None:
    return ", ".join(map(bytes_label, sizes)) if sizes else None
