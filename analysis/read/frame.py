"""Puts records into one frame with a row per record, that is, per cell and repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.read.metrics import METRICS, RECORD_METRICS
from analysis.read.results import Results
from bench.common.environment import code_label
from bench.record.record import Provenance, Record

RECORD_COLUMNS = (
    "cell_id", "experiment", "role", "repeat", "order", "status", "reason", "provenance",
    "started_at", "wall_s", "fixed_cost_s",
)  # fmt: skip
DERIVED_COLUMNS = ("code", "torch", "device_name", "device_memory_bytes", "sequences_per_step")
METRIC_COLUMNS = tuple(metric.name for metric in RECORD_METRICS)
NUMBER_COLUMNS = frozenset(
    {"device_memory_bytes", *(metric.name for metric in RECORD_METRICS if not metric.is_text)}
)
NOT_SETTINGS = frozenset({*RECORD_COLUMNS, *DERIVED_COLUMNS, *METRICS})
"""Columns that are not part of a cell's configuration."""
SETTINGS = (
    "seq_len", "strategy", "sp_degree", "layout", "kernel", "engine", "dtype", "model", "workload", "batch",
    "checkpointing", "loss", "model.num_layers", "hardware", "cluster.world_size", "cluster.device",
    "cluster.threads_per_rank", "cluster.ranks_per_gpu", "cluster.memory_limit_gib", "cluster.nodes",
    "cluster.network", "replay.rank", "engine.leaf", "tiled_mlp", "offload.activations", "offload.optimizer",
    "measure.nvtx",
)  # fmt: skip
"""Settings that the analysis reads; the frame has a column for them even where no record has the setting."""
RAN_HERE = frozenset({Provenance.MEASURED, Provenance.REPLAYED})
"""Provenances for which the environment describes the machine that the numbers belong to."""


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame that has every column that the analysis reads.

    A missing value is None, or NaN in a column of numbers.
    """
    settings = dict.fromkeys(key for row in rows for key in row if key not in NOT_SETTINGS)
    columns = (*RECORD_COLUMNS, *settings, *DERIVED_COLUMNS, *METRIC_COLUMNS, *SETTINGS)
    return pd.DataFrame({key: _column(key, [row.get(key) for row in rows]) for key in dict.fromkeys(columns)})


def _column(name: str, values: list[Any]) -> pd.Series[Any] | list[Any]:
    if name in NUMBER_COLUMNS:
        return pd.Series(values, dtype="float64")
    return values


def config_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns of the cell's configuration, in the record's order."""
    return [column for column in frame.columns if column not in NOT_SETTINGS]


def row_of(record: Record, peaks: Mapping[str, float]) -> dict[str, Any]:
    """Return a record's settings, fields and metrics by column.

    A list or mapping among the settings becomes JSON. The device and its memory are None unless the record
    was measured or replayed on this device; on a CPU the memory is None too. `peaks` has the peak FLOP/s by
    hardware name.
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
        **{
            metric.name: metric.from_record(results)
            for metric in RECORD_METRICS
            if metric.from_record is not None
        },
    }


def _comparable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _sequences_per_step(config: Mapping[str, Any]) -> int | None:
    """Return the number of sequences in one optimizer step over all ranks; None where it is not recorded."""
    count = 1
    for key in ("batch", "grad_accum", "dp_replicate", "dp_shard"):
        if config.get(key) is None:
            return None
        count *= config[key]
    return count
