"""Holds the cells of a report with everything that depends on all of them: series, names, caveats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import pandas as pd

from analysis.cells.comparison import with_comparisons, work_number
from analysis.cells.difference import Processes, processes_of
from analysis.cells.series import Series, cell_names, keys_and_number, series_of
from analysis.cells.summary import summarise
from analysis.labels import count_label
from bench.config import NOT_USED
from bench.record.record import Provenance, Role

CPU_CAVEAT = "CPU results do not rank strategies for GPUs."
SHARED_GPU_CAVEAT = "Ranks shared a GPU: their results are valid, their speeds are not."
SYNTHETIC_CAVEAT = "Synthetic: no real device made these numbers, so they prove nothing."
REPLAYED_BANNER = "Replayed cells: one rank ran, and the link is modelled."
HEADING_KEYS: Mapping[str, str] = {"model": "models", "engine": "engines", "dtype": "dtypes"}
"""Settings that a heading names, with the plural for cells that differ in them."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of a report. Properties that depend on all cells are computed once, on first use."""

    frame: pd.DataFrame
    """One row per cell, with the columns of settings, metrics and comparisons."""
    work: pd.Series[int]
    """Number of each cell's group of comparable cells, which have the same workload."""
    all_processes: pd.DataFrame
    """Speeds and start of each process that gave a speed, indexed by the row of its cell."""

    @classmethod
    def of_records(cls, frame: pd.DataFrame) -> Self:
        """Return the cells of a frame of records, with their comparisons."""
        summary = summarise(frame)
        work = work_number(summary.rows)
        return cls(with_comparisons(summary.rows, work), work, summary.processes)

    def __len__(self) -> int:
        return len(self.frame)

    def select(self, rows: pd.Series[bool] | pd.Index[Any]) -> Self:
        """Return only the cells in some rows of the frame, given by a mask or by labels.

        Series and names are computed again, because fewer settings may differ.
        """
        frame = self.frame.loc[rows].copy()  # one block of memory makes later selections fast
        is_in_part = self.all_processes.index.isin(frame.index)
        return type(self)(frame, self.work.loc[rows], self.all_processes[is_in_part])

    def with_statuses(self, statuses: pd.Series[str]) -> Self:
        """Return the same cells with other statuses."""
        return replace(self, frame=self.frame.assign(status=statuses))

    @cached_property
    def process_counts(self) -> pd.Series[int]:
        """Number of processes of each cell that gave a speed."""
        return self.all_processes.index.value_counts().reindex(self.frame.index, fill_value=0)

    def processes(self, row: int) -> Processes:
        """Return the processes of one cell that gave a speed."""
        return processes_of(self.all_processes.loc[[row]])

    @cached_property
    def rows(self) -> list[dict[Any, Any]]:
        """Values of each cell by column."""
        return self.frame.to_dict("records")

    def rows_of(self, part: pd.DataFrame) -> list[dict[Any, Any]]:
        """Return the values by column of some rows of the frame, without converting the frame again."""
        return [self._row_at[label] for label in part.index]

    @property
    def keys(self) -> list[str]:
        """Columns that distinguish the series, in addition to strategy and length."""
        return self._keys_and_number[0]

    @property
    def series_number(self) -> pd.Series[int]:
        """Number of each cell's series."""
        return self._keys_and_number[1]

    @cached_property
    def series(self) -> list[Series]:
        """Series of the cells, `local` first; a figure draws a line for each."""
        return [*series_of(self.frame, self.keys)]

    @cached_property
    def names(self) -> pd.Series[str]:
        """Name of each cell: its strategy and the settings that differ from other cells of that strategy."""
        return cell_names(self.frame, self.keys, self.series_number)

    @cached_property
    def is_cpu(self) -> bool:
        """Whether any cell ran on a CPU or is predicted for one."""
        return bool(any(self.frame[key].eq("cpu").any() for key in ("cluster.device", "hardware")))

    @cached_property
    def shares_gpus(self) -> bool:
        """Whether the ranks of any cell share a GPU."""
        return shares_gpus(self.frame)

    @property
    def are_observed(self) -> pd.Series[bool]:
        """Whether each cell is an observed training loop, which our command line does not start."""
        return self.frame["role"].eq(Role.OBSERVED)

    @cached_property
    def are_predicted(self) -> pd.Series[bool]:
        """Whether each cell is predicted, which means that nothing ran."""
        return self.frame["provenance"].eq(Provenance.PREDICTED)

    @cached_property
    def are_replayed(self) -> pd.Series[bool]:
        """Whether each cell is replayed, which means that only one of its ranks ran."""
        return self.frame["provenance"].eq(Provenance.REPLAYED)

    @cached_property
    def has_synthetic(self) -> bool:
        """Whether any cell is invented, or ran on a test's substitute for a device."""
        return bool(self.frame["provenance"].eq(Provenance.SYNTHETIC).any())

    @property
    def is_all_predicted(self) -> bool:
        """Whether there are cells and all of them are predicted."""
        return bool(len(self) and self.are_predicted.all())

    @property
    def caveat(self) -> str | None:
        """Sentence that says why these cells do not rank strategies; None where they do."""
        if self.has_synthetic:
            return SYNTHETIC_CAVEAT
        return CPU_CAVEAT if self.is_cpu else SHARED_GPU_CAVEAT if self.shares_gpus else None

    @property
    def banner(self) -> str | None:
        """Warning for the top of each figure; None where the cells need no warning."""
        replayed = REPLAYED_BANNER if self.are_replayed.any() else None
        return " ".join(filter(None, (replayed, self.caveat))) or None

    @cached_property
    def heading(self) -> str:
        """Line on settings and machine: `measured: qwen3_nano, zero3, bf16 on NVIDIA H100, 2 ranks`."""
        if not len(self):
            return "no cells"
        settings = ", ".join(filter(None, (self._value_or_count(*item) for item in HEADING_KEYS.items())))
        provenances = " and ".join(sorted(map(str, self.frame["provenance"].dropna().unique())))
        machine = self._value_or_count("device_name", "devices") or self._value_or_count(
            "hardware", "machines"
        )
        if self.is_all_predicted:
            machine = self._value_or_count("hardware", "machines")
        machine = re.sub(r"\((R|TM)\)|\bCPU\b", "", machine)
        return f"{provenances}: {settings} on {' '.join(machine.split())}{self._rank_range()}"

    def _value_or_count(self, key: str, nouns: str) -> str:
        """Return the value of a setting that all cells share, or the number of values: `2 models`."""
        values = sorted(value for value in self.frame[key].dropna().unique() if value != NOT_USED)
        return str(values[0]) if len(values) == 1 else f"{len(values)} {nouns}" if values else ""

    def _rank_range(self) -> str:
        """Return `, 2 ranks` or `, 1 to 8 ranks`; empty where the number is not known."""
        ranks = self.frame["cluster.world_size"].dropna()
        if ranks.empty:
            return ""
        low, high = int(ranks.min()), int(ranks.max())
        return f", {count_label(high, 'rank') if low == high else f'{low} to {high} ranks'}"

    @cached_property
    def _row_at(self) -> dict[Any, dict[Any, Any]]:
        """Values by column of each cell, by the label of its row."""
        return dict(zip(self.frame.index, self.rows, strict=True))

    @cached_property
    def _keys_and_number(self) -> tuple[list[str], pd.Series[int]]:
        return keys_and_number(self.frame)


def shares_gpus(frame: pd.DataFrame) -> bool:
    """Return whether the ranks of any row share a GPU; records without the setting do not."""
    return bool(frame["cluster.ranks_per_gpu"].astype("float64").gt(1).any())
