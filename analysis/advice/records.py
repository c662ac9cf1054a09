"""Measured records of the work that options would do: what ran overrules what is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.advice.option import Measured, Option
from analysis.frame.archive import read_archive
from bench.config import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    WorkloadConfig,
)
from bench.record import Provenance, Role, Status

NOT_THE_WORK = (
    "mode", "experiment", "seed", "cluster", "cluster.threads_per_rank", "model", "model.path", "data",
    "data.path", "data.tokenizer", "data.deal", "optimizer.learning_rate", "optimizer.schedule",
    "optimizer.warmup_steps", "optimizer.schedule_steps", "optimizer.max_grad_norm",
)  # fmt: skip
"""Settings that change no step's time or memory, or name what others say in numbers; `measure.*` beside."""
ANSWERS = (Role.CELL, Role.REFERENCE)
GROUPS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "workload": WorkloadConfig,
    "data": DataConfig,
    "cluster": ClusterConfig,
    "offload": OffloadConfig,
}


def with_records(options: Iterable[Option], folders: Sequence[Path]) -> list[Option]:
    """The options, each with what records in these sweeps' folders say of it.

    Raises StoreError for a folder without records and for a line that is none.
    """
    found: dict[str, list[Mapping[Any, Any]]] = {}
    frame = read_archive(folders, {}).frame
    frame = frame[frame["provenance"].eq(Provenance.MEASURED) & frame["role"].isin(ANSWERS)]
    for row in frame.to_dict("records"):
        found.setdefault(_work({str(key): value for key, value in row.items()}), []).append(row)
    return [_measured(option, found.get(_work(option.cell.flat()), [])) for option in options]


def _measured(option: Option, rows: Sequence[Mapping[Any, Any]]) -> Option:
    """The option with the processes that gave a speed, or that ran out of memory where none did."""
    worked = [row for row in rows if row["status"] == Status.OK and pd.notna(row["tokens_per_s"])]
    ran_out = not worked and any(row["status"] == Status.OUT_OF_MEMORY for row in rows)
    if option.refused is not None or not (worked or ran_out):
        return option
    measured = Measured(
        tokens_per_s=tuple(float(row["tokens_per_s"]) for row in worked),
        started_at=tuple(row["started_at"] for row in worked),
        peak_allocated_bytes=_most(worked, "peak_allocated_bytes"),
        transfer=_most(worked, "attention_transfer_share"),
        ran_out=ran_out,
    )
    return replace(option, measured=measured)


def _most(rows: Sequence[Mapping[Any, Any]], column: str) -> float | None:
    return max((float(row[column]) for row in rows if pd.notna(row[column])), default=None)


def _work(settings: Mapping[str, Any]) -> str:
    """Equal for equal work. A setting that older records do not name had its default."""
    known = {**_defaults(), **{key: value for key, value in settings.items() if not _is_missing(value)}}
    decides = {key: known.get(key) for key in _keys()} | {
        key: value for key, value in known.items() if key.startswith(("env.", "strategy."))
    }
    return repr(sorted((key, _plain(value)) for key, value in decides.items()))


def _plain(value: Any) -> str:
    """A frame turns whole numbers into floats where some are missing."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and pd.isna(value))


@cache
def _keys() -> list[str]:
    """All settings that decide what a cell does, by a record's names."""
    own = [each.name for each in fields(RunConfig) if each.name not in (*GROUPS, "measure", "options", "env")]
    inner = [
        f"{group}.{each.name}"
        for group, kind in GROUPS.items()
        for each in fields(kind)
        if each.name != "name"
    ]
    return [key for key in [*own, *GROUPS, *inner] if key not in NOT_THE_WORK and key != "offload"]


@cache
def _defaults() -> dict[str, Any]:
    """Those of settings that were no choice once, by a record's names."""
    found = {each.name: each.default for each in fields(RunConfig) if each.default is not MISSING}
    for group, kind in GROUPS.items():
        given = {each.name: each.default for each in fields(kind) if each.default is not MISSING}
        found |= {group if key == "name" else f"{group}.{key}": value for key, value in given.items()}
    return found
