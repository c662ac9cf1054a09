"""Records to one tidy frame: one row per cell and repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.read.definitions import BY_COLUMN, OF_RECORD
from analysis.read.measured import measured
from analysis.read.recorded import Recorded
from bench.common.environment import code_label

Record = Mapping[str, Any]
HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "hardware"
RECORD_COLUMNS = (
    "cell_id", "experiment", "role", "repeat", "order", "status", "reason", "provenance",
    "started_at", "wall_s", "fixed_cost_s",
)  # fmt: skip
DERIVED_COLUMNS = ("code", "torch", "device_name", "device_memory_bytes", "sequences_per_step")
METRIC_COLUMNS = tuple(each.column for each in OF_RECORD)
NUMBER_COLUMNS = frozenset({"device_memory_bytes", *(each.column for each in OF_RECORD if not each.is_text)})
NO_SETTING = frozenset({*RECORD_COLUMNS, *DERIVED_COLUMNS, *BY_COLUMN})
"""Every column that is not part of a cell's configuration."""
SETTINGS = (
    "seq_len", "strategy", "sp_degree", "layout", "kernel", "engine", "dtype", "model", "workload", "batch",
    "checkpointing", "loss", "model.num_layers", "hardware", "cluster.world_size", "cluster.device",
    "cluster.threads_per_rank", "cluster.ranks_per_gpu", "cluster.memory_limit_gib", "cluster.nodes",
    "cluster.network", "replay.rank", "engine.leaf", "tiled_mlp", "offload.activations", "offload.optimizer",
    "measure.nvtx",
)  # fmt: skip
"""Settings that the analysis reads: the frame has them also where no record does."""
RAN_HERE = frozenset({"measured", "replayed"})
"""Provenances whose environment is the machine the numbers belong to."""


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a frame, with every column that the analysis reads also where none of them has it.

    What a row lacks is None, or NaN among numbers.
    """
    settings = dict.fromkeys(key for row in rows for key in row if key not in NO_SETTING)
    known = (*RECORD_COLUMNS, *settings, *DERIVED_COLUMNS, *METRIC_COLUMNS, *SETTINGS)
    return pd.DataFrame({key: _column(key, [row.get(key) for row in rows]) for key in dict.fromkeys(known)})


def _column(name: str, values: list[Any]) -> pd.Series[Any] | list[Any]:
    if name in NUMBER_COLUMNS:
        return pd.Series(values, dtype="float64")
    return values


def device_name(record: Recorded) -> str | None:
    """The device the numbers belong to; None where another machine than the target wrote the record."""
    ran_here = record.provenance in RAN_HERE
    return record.environment.get("device_name") if ran_here and record.environment else None


def _software(record: Recorded) -> tuple[str | None, str | None]:
    """The code and the torch that a record was made with."""
    environment = record.environment or {}
    return code_label(environment), (environment.get("packages") or {}).get("torch")


def device_memory_bytes(record: Recorded) -> int | None:
    """What one GPU of the machine has; None on a CPU and where the numbers belong to another machine."""
    if record.provenance not in RAN_HERE or not record.environment:
        return None
    sizes = record.environment.get("gpu_memory_bytes")
    return sizes[0] if sizes else None


def config_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that hold the cell's configuration, in the record's order."""
    return [column for column in frame.columns if column not in NO_SETTING]


def peak_flops_per_s(folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """Dense 16-bit peak per hardware name, FLOP/s, for the hardware whose datasheet is known."""
    return hardware_facts("peak_flops_per_s", folder)


def hardware_facts(key: str, folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """One number per hardware name, for the hardware of which it is known."""
    return {each["name"]: float(each[key]) for each in _hardware(folder) if key in each}


@cache
def _hardware(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The contents of the folder's files, read once a process."""
    return [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(folder.glob("*.yaml"))]


@dataclass(frozen=True, slots=True)
class NodeLink:
    """What joins devices of one node."""

    name: str
    bytes_per_s: float
    """Of one device in one direction."""


def node_links(folder: Path = HARDWARE_FOLDER) -> dict[str, NodeLink]:
    """Per hardware name the link within a node, for the hardware of which it is known."""
    nodes = {each["name"]: each["links"]["node"] for each in _hardware(folder) if "links" in each}
    return {name: NodeLink(node["name"], float(node["bytes_per_s"])) for name, node in nodes.items()}


def device_names(folder: Path = HARDWARE_FOLDER) -> dict[str, tuple[str, ...]]:
    """Per hardware name what NVML calls such a device."""
    return {each["name"]: tuple(each["device_names"]) for each in _hardware(folder) if "device_names" in each}


def row_of(record: Recorded, peaks: Mapping[str, float]) -> dict[str, Any]:
    """A record's row of the frame, by column. `peaks` maps hardware to peak FLOP/s.

    A setting that is no single value stands as its JSON.
    """
    code, torch = _software(record)
    found = measured(record, peaks)
    return {
        **{name: _comparable(value) for name, value in record.config.items()},
        **{name: getattr(record, name) for name in RECORD_COLUMNS},
        "code": code,
        "torch": torch,
        "device_name": device_name(record),
        "device_memory_bytes": device_memory_bytes(record),
        "sequences_per_step": _sequences_per_step(record.config),
        **{each.column: each.value_of(found) for each in OF_RECORD},
    }


def _comparable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _sequences_per_step(config: Mapping[str, Any]) -> int | None:
    """Whole sequences in one optimizer step over all ranks; None where a record does not say."""
    count = 1
    for key in ("batch", "grad_accum", "dp_replicate", "dp_shard"):
        if config.get(key) is None:
            return None
        count *= config[key]
    return count
