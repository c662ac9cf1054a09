"""Records to one tidy frame: one row per cell and repeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from analysis.frame.columns import Columns, Same, below, numbers, packed, value_by_value
from analysis.metrics.definitions import BY_COLUMN, OF_RECORD, metric_columns
from analysis.metrics.measured import Measured, measured
from analysis.metrics.recorded import Recorded
from bench.environment import code_label

Record = Mapping[str, Any]


class Row(NamedTuple):
    """What is kept of one record until it is a row of the frame."""

    identity: tuple[Any, ...]
    """The values of RECORD_COLUMNS."""
    config: Mapping[str, Any]
    derived: tuple[Any, ...]
    """The values of DERIVED_COLUMNS."""
    measured: Measured


HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "hardware"
RECORD_COLUMNS = (
    "cell_id", "experiment", "role", "repeat", "order", "status", "reason", "provenance",
    "started_at", "wall_s", "fixed_cost_s",
)  # fmt: skip
IDENTITY = attrgetter(*RECORD_COLUMNS)
DERIVED_COLUMNS = ("code", "torch", "device_name", "device_memory_bytes", "sequences_per_step")
METRIC_COLUMNS = tuple(each.column for each in OF_RECORD)
NUMBER_COLUMNS = frozenset({"device_memory_bytes", *(each.column for each in OF_RECORD if not each.is_text)})
NO_SETTING = frozenset({*RECORD_COLUMNS, *DERIVED_COLUMNS, *BY_COLUMN})
"""Every column that is not part of a cell's configuration."""
SWITCHES = (
    "tiled_mlp", "offload.activations", "offload.optimizer", "measure.nvtx", "measure.memory_snapshot",
)  # fmt: skip
"""Settings that older records do not name: what they name now was off."""
SETTINGS = (
    "seq_len", "strategy", "sp_degree", "layout", "kernel", "engine", "dtype", "model", "workload", "batch",
    "checkpointing", "loss", "model.num_layers", "hardware", "cluster.world_size", "cluster.device",
    "cluster.threads_per_rank", "cluster.ranks_per_gpu", "cluster.memory_limit_gib", "cluster.nodes",
    "cluster.network", *SWITCHES,
)  # fmt: skip
"""Settings that the analysis reads: the frame has them also where no record does."""
RAN_HERE = frozenset({"measured", "replayed"})
"""Provenances whose environment is the machine the numbers belong to."""


def columns_of(rows: Sequence[Row]) -> Columns:
    """Rows turned into columns; what a row lacks is None, or NaN among numbers.

    A metric that none of the rows has is no column of theirs.
    """
    if not rows:
        return {}
    identity, configs, derived, found = zip(*rows, strict=True)
    others = _settings(configs) | _by_name(DERIVED_COLUMNS, derived)
    return {
        **{name: value_by_value(column) for name, column in _by_name(RECORD_COLUMNS, identity).items()},
        **{
            name: numbers(column) if name in NUMBER_COLUMNS else packed(column)
            for name, column in others.items()
        },
        **metric_columns(found),
    }


def joined(parts: Sequence[Columns], counts: Sequence[int]) -> Columns:
    """The columns of all parts, of so many rows each, below one another; what a part lacks is None."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: below([part.get(key) for part in parts], counts) for key in keys}


def frame_of(columns: Columns) -> pd.DataFrame:
    """The columns as a frame, with every column that the analysis reads also where no record has it."""
    known = (*RECORD_COLUMNS, *SETTINGS, *DERIVED_COLUMNS, *METRIC_COLUMNS)
    if not columns:
        return pd.DataFrame({key: np.empty(0) if key in NUMBER_COLUMNS else [] for key in known})
    found = {key: column.value if isinstance(column, Same) else column for key, column in columns.items()}
    own = {key: column for key, column in found.items() if key not in METRIC_COLUMNS}
    metrics = {key: found.get(key, np.nan if key in NUMBER_COLUMNS else None) for key in METRIC_COLUMNS}
    lacking = {key: None for key in SETTINGS if key not in found}
    switches = {key: _off_where_missing(found.get(key)) for key in SWITCHES}
    return pd.DataFrame(own | metrics | lacking | switches)


def _off_where_missing(column: Any) -> Any:
    if isinstance(column, list):
        return [False if value is None else value for value in column]
    return False if column is None else column


def _by_name(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> Columns:
    return {name: [*column] for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _settings(configs: Sequence[Mapping[str, Any]]) -> Columns:
    """The configurations' columns."""
    shapes = dict.fromkeys(map(tuple, configs))
    if len(shapes) == 1:  # as in most sweeps, and several times as fast
        (keys,) = shapes
        columns = _by_name(keys, (config.values() for config in configs))
    else:
        columns = {
            key: [config.get(key) for config in configs] for key in dict.fromkeys(chain.from_iterable(shapes))
        }
    return {key: column for key, column in columns.items() if key not in RECORD_COLUMNS}


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


def row_of(record: Recorded, peaks: Mapping[str, float]) -> Row:
    """What of a record becomes a row of the frame. `peaks` maps hardware to peak FLOP/s."""
    return Row(
        identity=IDENTITY(record),
        config=record.config,
        derived=(
            *_software(record),
            device_name(record),
            device_memory_bytes(record),
            _sequences_per_step(record.config),
        ),
        measured=measured(record, peaks),
    )


def _sequences_per_step(config: Mapping[str, Any]) -> int | None:
    """Whole sequences in one optimizer step over all ranks; None where a record does not say."""
    count = 1
    for key in ("batch", "grad_accum", "dp_replicate", "dp_shard"):
        if config.get(key) is None:
            return None
        count *= config[key]
    return count
