"""Sweep folders to records, records to one tidy frame: one row per cell and repeat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.metrics import Metrics, of_record
from analysis.wellformed import flaw
from bench.store import StoreError, read_records

Record = Mapping[str, Any]

HARDWARE_FOLDER = Path(__file__).resolve().parent.parent / "conf" / "hardware"
RECORD_COLUMNS = (
    "cell_id", "experiment", "role", "repeat", "order", "status", "reason", "provenance",
    "started_at", "wall_s", "fixed_cost_s",
)  # fmt: skip
DERIVED_COLUMNS = ("device_name", "sequences_per_step")
SUMMARY_COLUMNS = (
    "repeats", "failed_repeats", "n", "n_of", "tokens_per_s_lowest_repeat",
    "tokens_per_s_highest_repeat", "speed_up", "speed_up_base_cell_id", "speed_up_base_ranks",
)  # fmt: skip
"""What `summarise` and `with_speed_up` add; listed here because config_columns must know them."""
METRIC_COLUMNS = tuple(field.name for field in fields(Metrics))
NUMBER_COLUMNS = tuple(name for name in METRIC_COLUMNS if name not in {"note", "warmup"})
REQUIRED_CONFIG = ("seq_len", "strategy")
RAN_HERE = frozenset({"measured", "replayed"})
"""Provenances whose environment is the machine the numbers belong to."""


def read_sweeps(folders: Iterable[Path]) -> list[Record]:
    """The records of all folders; of a cell that was run again after a failure only the last attempt.

    Raises StoreError, in one line, for a folder without records and for a line that is no record.
    """
    return [record for folder in folders for record in _read_sweep(folder)]


def to_frame(records: Sequence[Record], peaks: Mapping[str, float]) -> pd.DataFrame:
    """One row per record: identity, configuration by the command line's names, metrics with units.

    What is missing is None or NaN, never 0. `peaks` maps hardware to peak FLOP/s.
    """
    rows = [_row(record, peaks) for record in records]
    keys = {key: None for row in rows for key in row}
    columns = [*keys] or [*RECORD_COLUMNS, *REQUIRED_CONFIG, *DERIVED_COLUMNS, *METRIC_COLUMNS]
    frame = pd.DataFrame({column: [row.get(column) for row in rows] for column in columns})
    # A column in which every number is missing must still be one of numbers.
    return frame.astype(dict.fromkeys(NUMBER_COLUMNS, "float64"))


def device_name(record: Record) -> str | None:
    """The device the numbers belong to; None where another machine than the target wrote the record."""
    ran_here = record["provenance"] in RAN_HERE
    return (record.get("environment") or {}).get("device_name") if ran_here else None


def config_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that hold the cell's configuration, in the record's order."""
    other = {*RECORD_COLUMNS, *DERIVED_COLUMNS, *METRIC_COLUMNS, *SUMMARY_COLUMNS}
    return [column for column in frame.columns if column not in other]


def peak_flops_per_s(folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """Dense 16-bit peak per hardware name, FLOP/s, for the hardware whose datasheet is known."""
    known = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    return {each["name"]: float(each["peak_flops_per_s"]) for each in known if "peak_flops_per_s" in each}


def _read_sweep(folder: Path) -> list[Record]:
    path = folder / "records.jsonl"
    if not _is_file(path):
        hint = "name a sweep's folder, for example results/sweeps/<time>"
        raise StoreError(f"{folder}: no file records.jsonl in this folder; {hint}")
    last: dict[tuple[str, int], Record] = {}
    for number, record in enumerate(read_records(path), start=1):
        wrong = flaw(record)
        if wrong is not None:
            raise StoreError(f"{path}:{number}: not a record: {wrong}")
        last[record["cell_id"], record["repeat"]] = record
    return [*last.values()]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error})") from None


def _row(record: Record, peaks: Mapping[str, float]) -> dict[str, Any]:
    config = record["config"]
    metrics = of_record(record, peaks)
    return {
        **{key: record.get(key) for key in RECORD_COLUMNS},
        **{key: _scalar(value) for key, value in config.items() if key not in RECORD_COLUMNS},
        "device_name": device_name(record),
        "sequences_per_step": _sequences_per_step(config),
        **{name: getattr(metrics, name) for name in METRIC_COLUMNS},
    }


def _sequences_per_step(config: Mapping[str, Any]) -> int | None:
    """Whole sequences in one optimizer step over all ranks; None where a record does not say."""
    count = 1
    for key in ("batch", "grad_accum", "dp_replicate", "dp_shard"):
        if config.get(key) is None:
            return None
        count *= config[key]
    return count


def _scalar(value: Any) -> Any:
    """The value itself, or its JSON where it is no single value: a frame's cells must be comparable."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value
