"""Adds the capacity to cells: the memory that one rank may use, by its limit or its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.labels import bytes_label
from analysis.read.hardware import hardware_facts
from bench.common.labels import GIB
from bench.config import NOT_USED

LIMIT = "cluster.memory_limit_gib"
NAME_COLUMNS: Mapping[str, str] = {"device": "device_name", "hardware": "hardware"}
"""Column with the name of the device or hardware, by source of the capacity; a limit has none."""


def with_capacity(summary: pd.DataFrame) -> pd.DataFrame:
    """Add `capacity_bytes`, `capacity_source` and `capacity_share`, the peak allocated over the capacity.

    The source is `limit`, `device` (size in the record) or `hardware` (size in the hardware's file in conf).
    Ranks that share a device have equal parts of its memory. All three columns are missing where the capacity
    is unknown, and on a CPU without a limit, where ranks share memory.
    """
    limit, hardware = summary[LIMIT].astype("float64") * GIB, summary["hardware"]
    device = summary["device_memory_bytes"].where(hardware.ne("cpu"))
    sharing = summary["cluster.ranks_per_gpu"].astype("float64").fillna(1.0)
    memory = device.fillna(hardware.map(hardware_facts("memory_bytes"))).astype("float64") / sharing
    is_limited = limit.notna() & ~(limit > memory)
    capacity = limit.where(is_limited, memory)
    sources = [is_limited, device.notna(), memory.notna()]
    return summary.assign(
        capacity_bytes=capacity,
        capacity_source=pd.Series(
            np.select(sources, ["limit", "device", "hardware"], NOT_USED), index=summary.index, dtype="object"
        ).where(capacity.notna(), None),
        capacity_share=summary["peak_allocated_bytes"] / capacity,
    )


def capacity_label(cell: Mapping[Any, Any]) -> str:
    """Return `limit 0.2 GiB` or `h100_80gb: 79.6 GiB`; empty where a cell's capacity is not known."""
    size = cell["capacity_bytes"]
    if pd.isna(size):
        return ""
    if cell["capacity_source"] == "limit":
        return f"limit {size / GIB:g} GiB"
    name = cell[NAME_COLUMNS[cell["capacity_source"]]]
    return f"{name if isinstance(name, str) else 'device'}: {bytes_label(size)}"


def capacities_of(frame: pd.DataFrame) -> list[tuple[float, str]]:
    """Return the distinct capacities of the cells in `frame`, ascending: bytes and label of each."""
    known = frame[frame["capacity_bytes"].notna()].drop_duplicates(["capacity_bytes", "capacity_source"])
    return sorted({(cell["capacity_bytes"], capacity_label(cell)) for cell in known.to_dict("records")})
