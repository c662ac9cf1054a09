"""The memory that one rank may use: the limit it was given, or what its device has."""

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
NAMES: Mapping[str, str] = {"device": "device_name", "hardware": "hardware"}
"""Per source other than a limit, the column that says whose memory it is."""


def with_capacity(summary: pd.DataFrame) -> pd.DataFrame:
    """Adds `capacity_bytes`, `capacity_source` and `capacity_share`, the peak allocated as a part of it.

    The source is `limit`, `device` (as its record says) or `hardware` (as its file in conf says). Ranks that
    share a device have equal parts of it. All three are missing where nothing is known, so on a CPU without a
    limit: its ranks share memory.
    """
    limit, hardware = summary[LIMIT].astype("float64") * GIB, summary["hardware"]
    device = summary["device_memory_bytes"].where(hardware.ne("cpu"))
    sharing = summary["cluster.ranks_per_gpu"].astype("float64").fillna(1.0)
    whole = device.fillna(hardware.map(hardware_facts("memory_bytes"))).astype("float64") / sharing
    is_limited = limit.notna() & ~(limit > whole)
    capacity = limit.where(is_limited, whole)
    sources = [is_limited, device.notna(), whole.notna()]
    return summary.assign(
        capacity_bytes=capacity,
        capacity_source=pd.Series(
            np.select(sources, ["limit", "device", "hardware"], NOT_USED), index=summary.index, dtype="object"
        ).where(capacity.notna(), None),
        capacity_share=summary["peak_allocated_bytes"] / capacity,
    )


def capacity_label(cell: Mapping[Any, Any]) -> str:
    """`limit 0.2 GiB` or `h100_80gb: 79.6 GiB`; empty where a cell's capacity is not known."""
    size = cell["capacity_bytes"]
    if pd.isna(size):
        return ""
    if cell["capacity_source"] == "limit":
        return f"limit {size / GIB:g} GiB"
    name = cell[NAMES[cell["capacity_source"]]]
    return f"{name if isinstance(name, str) else 'device'}: {bytes_label(size)}"


def capacities_of(frame: pd.DataFrame) -> list[tuple[float, str]]:
    """Return the distinct capacities of these cells, in bytes and in words, ascending."""
    known = frame[frame["capacity_bytes"].notna()].drop_duplicates(["capacity_bytes", "capacity_source"])
    return sorted({(cell["capacity_bytes"], capacity_label(cell)) for cell in known.to_dict("records")})
