"""Records to one tidy frame: one row per cell and repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.read.metrics import METRICS, OF_RECORD
from analysis.read.results import Results
from bench.common.environment import code_label
from bench.record.record import Provenance, Record

RECORD_COLUMNS = (
    "cell_id", "experiment", "role", "repeat", "order", "status", "reason", "provenance",
    "started_at", "wall_s", "fixed_cost_s",
)  # fmt: skip
DERIVED_COLUMNS = ("code", "torch", "device_name", "device_memory_bytes", "sequences_per_step")
METRIC_COLUMNS = tuple(each.name for each in OF_RECORD)
NUMBER_COLUMNS = frozenset({"device_memory_bytes", *(each.name for each in OF_RECORD if not each.is_text)})
NO_SETTING = frozenset({*RECORD_COLUMNS, *DERIVED_COLUMNS, *METRICS})
"""Every column that is not part of a cell's configuration."""
SETTINGS = (
    "seq_len", "strategy", "sp_degree", "layout", "kernel", "engine", "dtype", "model", "workload", "batch",
    "checkpointing", "loss", "model.num_layers", "hardware", "cluster.world_size", "cluster.device",
    "cluster.threads_per_rank", "cluster.ranks_per_gpu", "cluster.memory_limit_gib", "cluster.nodes",
    "cluster.network", "replay.rank", "engine.leaf", "tiled_mlp", "offload.activations", "offload.optimizer",
    "measure.nvtx",
)  # fmt: skip
"""Settings that the analysis reads: the frame has them also where no record does."""
RAN_HERE = frozenset({Provenance.MEASURED, Provenance.REPLAYED})
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


def config_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that hold the cell's configuration, in the record's order."""
    return [column for column in frame.columns if column not in NO_SETTING]


def row_of(record: Record, peaks: Mapping[str, float]) -> dict[str, Any]:
    """Return a record's row of the frame, by column. `peaks` maps hardware to peak FLOP/s.

    A setting that is no single value stands as its JSON. The device is None where another machine than the
    target wrote the record, its memory also on a CPU.
    """
    results, environment, ran_here = Results(record, peaks), record.environment, record.provenance in RAN_HERE
    return {
        **{name: _comparable(value) for name, value in record.config.items()},
        **{name: getattr(record, name) for name in RECORD_COLUMNS},
        "code": code_label(environment),
        "torch": environment.packages.get("torch"),
        "device_name": environment.device_name if ran_here else None,
        "device_memory_bytes": next(iter(environment.gpu_memory_bytes), None) if ran_here else None,
        "sequences_per_step": _sequences_per_step(record.config),
        **{each.name: each.from_record(results) for each in OF_RECORD if each.from_record is not None},
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
