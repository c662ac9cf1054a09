"""From what the ranks measured to a hardware file, and to a table as nccl-tests prints it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bench.config import DTYPE_BYTES, RunConfig
from bench.cost.calibration import BUS_SHARE
from bench.environment import describe, installed, this_machine
from bench.labels import GIB

Reports = Sequence[Mapping[str, Any]]
Key = tuple[str, str]
Row = tuple[tuple[int, ...], float, float, float]


def merged(reports: Reports) -> dict[Key, list[Row]]:
    """Per table and dtype the rows of all ranks as one: the mean of their medians, the widest spread."""
    tables: defaultdict[Key, list[Row]] = defaultdict(list)
    for of_ranks in zip(*(report["rows"] for report in reports), strict=True):
        table, dtype, sizes = of_ranks[0][:3]
        lows, medians, highs = zip(*(row[3:] for row in of_ranks), strict=True)
        tables[table, dtype].append((tuple(sizes), min(lows), sum(medians) / len(medians), max(highs)))
    return dict(tables)


def calibration_text(name: str, cell: RunConfig, reports: Reports) -> str:
    """The file: the form of conf/hardware/, and the tables as blocks of comma-separated lines."""
    tables, found = merged(reports), describe({})
    lines = [
        f"# Measured by `python -m bench.calibrate` on {found['device_name']}",
        f"name: {name}",
        *(f"{key}: {value}" for key, value in _single_figures(tables, cell).items()),
        "calibrated:",
        f"  date: '{datetime.now(UTC):%Y-%m-%d}'",
        f"  commit: '{found['git_commit'] or 'not known'}'",
        f"  torch: '{installed('torch')}'",
        f"  device_name: '{found['device_name']}'",
        f"  ranks: {cell.cluster.world_size}",
        f"  threads_per_rank: {cell.cluster.threads_per_rank}",
        "  tables:  # sizes; then microseconds: low, median, high of the calls",
    ]
    for (table, dtype), rows in sorted(tables.items()):
        lines.append(f"    {table} {dtype}: |")
        lines += [f"      {_row_text(row)}" for row in sorted(rows)]
    return "\n".join(lines) + "\n"


def exchange_lines(reports: Reports, ranks: int) -> list[str]:
    """Kind, bytes, time and both bandwidths, as nccl-tests defines them (its doc/PERFORMANCE.md)."""
    lines = [f"{'kind':16}{'dtype':6}{'sent bytes':>12}{'us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"]
    for (kind, dtype), rows in merged(reports).items():
        if kind in BUS_SHARE:
            for (sent,), _, median, _ in rows:
                bus = sent / median / 1e9
                algorithm = bus / BUS_SHARE[kind](ranks)
                lines.append(f"{kind:16}{dtype:6}{sent:12,}{1e6 * median:12.1f}{algorithm:12.3f}{bus:12.3f}")
    return lines


def _row_text(row: Row) -> str:
    sizes, *seconds = row
    return ",".join([*map(str, sizes), *(f"{1e6 * each:.4g}" for each in seconds)])


def _single_figures(tables: Mapping[Key, Sequence[Row]], cell: RunConfig) -> dict[str, Any]:
    """What a datasheet says of a device, from the best of what was measured."""
    dtype = min(dtype for name, dtype in tables if name == "product")  # bf16 where it was measured
    peak = max(2 * math.prod(sizes) / median for sizes, _, median, _ in tables["product", dtype])
    moved_bytes = 3 * DTYPE_BYTES[dtype]
    moved = max(moved_bytes * math.prod(sizes) / median for sizes, _, median, _ in tables["sum", dtype])
    memory_bytes = min(this_machine().gpu_memory_bytes, default=this_machine().memory_bytes)
    link = _link(tables)
    gpus = [this_machine().device_name] if cell.cluster.device == "cuda" else []
    return {
        "device_names": json.dumps(gpus),
        "peak_flops_per_s": f"{peak:.4e}",
        "memory_bytes_per_s": f"{moved:.4e}",
        "memory_bytes": memory_bytes,
        "usable_bytes": memory_bytes - (GIB if cell.cluster.device == "cuda" else 0),
        "devices_per_node": cell.cluster.world_size,
        "price_per_device_hour": "null",
        "links": f"{{node: {link}, network: {link}}}",
        "rates": "{matmul: [0.4, 0.7, 1.0], memory: [0.4, 0.7, 1.0], link: [0.5, 0.8, 1.0],"
        f" attention_forward: {{{cell.kernel}: [0.3, 0.5, 0.8]}},"
        f" attention_backward: {{{cell.kernel}: [0.2, 0.4, 0.7]}}}}",
        "host_s_per_operation": "[0.0, 0.0, 0.0]",
    }


def _link(tables: Mapping[Key, Sequence[Row]]) -> str:
    """Of a message from one rank to the next."""
    rows = tables.get(("send", "any"), [((1,), 0.0, 1.0, 0.0)])
    rate = max(sizes[0] / median for sizes, _, median, _ in rows)
    latency = min(median for _, _, median, _ in rows)
    return f"{{name: measured, bytes_per_s: {rate:.4e}, latency_s: {latency:.4e}}}"
