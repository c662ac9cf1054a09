"""Cells beside one another, with what follows from all of them: series, names, comparisons, caveats."""

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
SHARED_GPU_CAVEAT = "Ranks share a GPU: results are right, speeds mean nothing."
SYNTHETIC_CAVEAT = "Synthetic: made on no real device; evidence for nothing."
REPLAYED_BANNER = "Replayed cells: one rank ran, the link is modelled."
HEADING_KEYS: Mapping[str, str] = {"model": "models", "engine": "engines", "dtype": "dtypes"}
"""Settings that a heading names, each with its plural for cells that differ in it."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells beside one another. Whatever follows from all of them is computed once, when it is asked for."""

    frame: pd.DataFrame
    """One row per cell, with every column that is measured, computed or set."""
    work: pd.Series[int]
    """Per cell the number of the group of comparable cells that it is in."""
    all_processes: pd.DataFrame
    """Per process that gave a speed its rates and its start, by the row of its cell."""

    @classmethod
    def of_records(cls, frame: pd.DataFrame) -> Self:
        """The cells behind a frame of records, each compared with the others."""
        summary = summarise(frame)
        work = work_number(summary.rows)
        return cls(with_comparisons(summary.rows, work), work, summary.processes)

    def __len__(self) -> int:
        return len(self.frame)

    def part(self, rows: pd.Series[bool] | pd.Index[Any]) -> Self:
        """Some of the cells, chosen by the rows of the frame; their series are told apart anew."""
        frame = self.frame.loc[rows].copy()  # in one piece, of which parts are quickly taken
        own = self.all_processes.index.isin(frame.index)
        return type(self)(frame, self.work.loc[rows], self.all_processes[own])

    def with_statuses(self, statuses: pd.Series[str]) -> Self:
        """These cells with these statuses in place of their own."""
        return replace(self, frame=self.frame.assign(status=statuses))

    @cached_property
    def process_counts(self) -> pd.Series[int]:
        """Per cell how many of its fresh processes gave a speed."""
        return self.all_processes.index.value_counts().reindex(self.frame.index, fill_value=0)

    def processes(self, row: int) -> Processes:
        """Those of one cell."""
        return processes_of(self.all_processes.loc[[row]])

    @cached_property
    def rows(self) -> list[dict[Any, Any]]:
        """Cell by cell the values by column."""
        return self.frame.to_dict("records")

    def rows_of(self, part: pd.DataFrame) -> list[dict[Any, Any]]:
        """Cell by cell the values of some rows of the frame, without converting them again."""
        return [self._row_at[label] for label in part.index]

    @property
    def keys(self) -> list[str]:
        """The columns that tell the series apart, beside strategy and length."""
        return self._keys_and_number[0]

    @property
    def series_number(self) -> pd.Series[int]:
        """Per cell the number of its series."""
        return self._keys_and_number[1]

    @cached_property
    def series(self) -> list[Series]:
        """What one line of a figure shows, `local` first."""
        return [*series_of(self.frame, self.keys)]

    @cached_property
    def names(self) -> pd.Series[str]:
        """Per cell its strategy and what sets it apart from others of that strategy."""
        return cell_names(self.frame, self.keys, self.series_number)

    @cached_property
    def is_cpu(self) -> bool:
        """Whether any of these cells is about a CPU."""
        return bool(any(self.frame[key].eq("cpu").any() for key in ("cluster.device", "hardware")))

    @cached_property
    def shares_gpus(self) -> bool:
        """Whether the ranks of any of these cells share a GPU."""
        return shares_gpus(self.frame)

    @property
    def are_observed(self) -> pd.Series[bool]:
        """Per cell whether it is somebody's own training loop, which has no command line of ours."""
        return self.frame["role"].eq(Role.OBSERVED)

    @cached_property
    def are_predicted(self) -> pd.Series[bool]:
        """Per cell whether it is arithmetic: nothing ran."""
        return self.frame["provenance"].eq(Provenance.PREDICTED)

    @cached_property
    def are_replayed(self) -> pd.Series[bool]:
        """Per cell whether one rank of it ran without the others."""
        return self.frame["provenance"].eq(Provenance.REPLAYED)

    @cached_property
    def are_synthetic(self) -> bool:
        """Whether any of these cells was made up, or ran on a test's stand-in for a device."""
        return bool(self.frame["provenance"].eq(Provenance.SYNTHETIC).any())

    @property
    def is_all_predicted(self) -> bool:
        """Whether nothing of these cells ran."""
        return bool(len(self) and self.are_predicted.all())

    @property
    def caveat(self) -> str | None:
        """Why these cells do not rank strategies, as a sentence; None where they do."""
        if self.are_synthetic:
            return SYNTHETIC_CAVEAT
        return CPU_CAVEAT if self.is_cpu else SHARED_GPU_CAVEAT if self.shares_gpus else None

    @property
    def banner(self) -> str | None:
        """A warning for the top of each figure; None where none is due."""
        replayed = REPLAYED_BANNER if self.are_replayed.any() else None
        return " ".join(filter(None, (replayed, self.caveat))) or None

    @cached_property
    def heading(self) -> str:
        """Line on what ran where: `measured: qwen3_nano, zero3, bf16 on NVIDIA H100, 2 ranks`."""
        if not len(self):
            return "no cells"
        what = ", ".join(filter(None, (self._one_of(key, nouns) for key, nouns in HEADING_KEYS.items())))
        how = " and ".join(sorted(map(str, self.frame["provenance"].dropna().unique())))
        where = self._one_of("device_name", "devices") or self._one_of("hardware", "machines")
        if self.is_all_predicted:
            where = self._one_of("hardware", "machines")
        where = re.sub(r"\((R|TM)\)|\bCPU\b", "", where)
        return f"{how}: {what} on {' '.join(where.split())}{self._rank_range()}"

    def _one_of(self, key: str, nouns: str) -> str:
        """The value that all cells have, or how many there are."""
        values = sorted(value for value in self.frame[key].dropna().unique() if value != NOT_USED)
        return str(values[0]) if len(values) == 1 else f"{len(values)} {nouns}" if values else ""

    def _rank_range(self) -> str:
        """`, 2 ranks` or `, 1 to 8 ranks`; empty where it is not known."""
        ranks = self.frame["cluster.world_size"].dropna()
        if ranks.empty:
            return ""
        low, high = int(ranks.min()), int(ranks.max())
        return f", {count_label(high, 'rank') if low == high else f'{low} to {high} ranks'}"

    @cached_property
    def _row_at(self) -> dict[Any, dict[Any, Any]]:
        return dict(zip(self.frame.index, self.rows, strict=True))

    @cached_property
    def _keys_and_number(self) -> tuple[list[str], pd.Series[int]]:
        return keys_and_number(self.frame)


def shares_gpus(frame: pd.DataFrame) -> bool:
    """Whether the ranks of any row share a GPU; records from before there was a choice do not."""
    return bool(frame["cluster.ranks_per_gpu"].astype("float64").gt(1).any())
