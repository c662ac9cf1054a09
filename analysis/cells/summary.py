"""One row per cell: the repeats of a cell reduced to their median, with what can be said about its spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from pandas.api.typing import DataFrameGroupBy

from analysis.metrics.definitions import Reduction, columns_reduced
from analysis.metrics.measured import tokens_per_s
from bench.statistics import median_interval

CELL = ["cell_id", "provenance", "hardware", "device_name", "code", "torch"]
"""What makes two records repeats of one another: the same request on the same machine and software."""

MEDIANS, RATES, FIRSTS = map(columns_reduced, (Reduction.MEDIAN, Reduction.RATE, Reduction.FIRST))
FIRSTS_OF_ALL = columns_reduced(Reduction.FIRST_OF_ALL)
LOWEST, HIGHEST, TOTALS = map(columns_reduced, (Reduction.LOWEST, Reduction.HIGHEST, Reduction.TOTAL))
INTERVALS = ["step_time_low_ms", "step_time_high_ms", "tokens_per_s_low", "tokens_per_s_high"]
REDUCED = frozenset({*MEDIANS, *RATES, *LOWEST, *HIGHEST, *TOTALS, *FIRSTS, *FIRSTS_OF_ALL, "started_at"})
Reduce = Callable[[Any], pd.DataFrame]
"""Of rows grouped by cell one row each."""
OF_ONE_REPEAT = frozenset({"repeat", "order"})
ORDER = ["seq_len", "strategy", "cluster.world_size", "sp_degree", "engine", "layout", "dtype"]


@dataclass(frozen=True, eq=False, slots=True)
class Summary:
    """The cells behind a frame of records."""

    rows: pd.DataFrame
    """One row per cell."""
    processes: pd.DataFrame
    """Per process that gave a speed its `tokens_per_s` and `started_at`, by the row of its cell."""


def summarise(frame: pd.DataFrame) -> Summary:
    """One row per cell, by length and then strategy, and the processes behind it.

    Adds `repeats`, `failed_repeats`, `n` with `n_of` (what the interval's samples are: steps of the only
    repeat, or repeats) and the lowest and highest repeat's tokens per second. `status` and `reason` are
    those of a failed repeat where there is one, `started_at` is the last repeat's.
    """
    cell = _cell_numbers(frame)
    failed = frame["status"] != "ok"
    shown = _shown_rows(frame, cell, failed)
    good, good_cell = (
        frame.loc[~failed, [*MEDIANS, *RATES, *LOWEST, *HIGHEST, *TOTALS, *FIRSTS]],
        cell[~failed],
    )
    reduced = [
        _by_cell(good[MEDIANS].astype("float64"), good_cell, DataFrameGroupBy.median),
        1 / _by_cell(1 / good[RATES].astype("float64"), good_cell, DataFrameGroupBy.median),
        _by_cell(good[LOWEST], good_cell, DataFrameGroupBy.min),
        _by_cell(good[HIGHEST], good_cell, DataFrameGroupBy.max),
        _by_cell(good[TOTALS], good_cell, partial(DataFrameGroupBy.sum, min_count=1)),
        _by_cell(good[FIRSTS], good_cell, DataFrameGroupBy.first),
        _by_cell(frame[FIRSTS_OF_ALL], cell, DataFrameGroupBy.first),
        _last_starts(frame["started_at"], cell).to_frame(),
    ]
    columns = [key for key in frame.columns if key not in OF_ONE_REPEAT]
    own = frame.loc[shown, [key for key in columns if key not in REDUCED]].set_index(cell[shown])
    summary = pd.concat([own, *(each.reindex(own.index) for each in reduced)], axis=1)[columns]
    summary["repeats"] = cell.value_counts()
    summary["failed_repeats"] = failed.groupby(cell).sum()
    rows = _with_spread(summary, good, good_cell)
    return Summary(rows.reset_index(drop=True), _processes(frame, cell, rows.index))


def _by_cell(rows: pd.DataFrame, cell: pd.Series[int], reduce: Reduce) -> pd.DataFrame:
    """By a cell's number its rows reduced to one; the only row of a cell stays as it is."""
    is_repeat = cell.duplicated(keep=False)
    if not is_repeat.any():  # as in most sweeps of many cells; to reduce them takes several times as long
        return rows.set_axis(cell)
    only = rows[~is_repeat].set_axis(cell[~is_repeat])
    return pd.concat([only, reduce(rows[is_repeat].groupby(cell[is_repeat]))])


def _processes(frame: pd.DataFrame, cell: pd.Series[int], cells_in_order: pd.Index[int]) -> pd.DataFrame:
    """Those of Summary, of cells that stand in this order."""
    gave_speed = frame["tokens_per_s"].notna() & (frame["status"] == "ok")
    row = pd.Series(range(len(cells_in_order)), index=cells_in_order, dtype="int64")
    processes = frame.loc[gave_speed, ["tokens_per_s", "started_at"]]
    return processes.set_index(cell[gave_speed].map(row)).sort_index(kind="stable")


def _cell_numbers(frame: pd.DataFrame) -> pd.Series[int]:
    """Per record the number of its cell, in order of first appearance."""
    return frame.groupby(CELL, dropna=False, sort=False).ngroup()


def _shown_rows(frame: pd.DataFrame, cell: pd.Series[int], failed: pd.Series[bool]) -> pd.Index[int]:
    """Of each cell the row that stands for it: its first that failed, else its first; in ORDER."""
    failed_first = failed.sort_values(ascending=False, kind="stable").index
    first = failed_first[~cell[failed_first].duplicated()]
    return frame.loc[first, ORDER].sort_values(ORDER, kind="stable").index


def _last_starts(started_at: pd.Series[str], cell: pd.Series[int]) -> pd.Series[str]:
    """By a cell's number when the last of its records was started, which may be known of none."""
    in_time = started_at.sort_values(kind="stable", na_position="first")
    last = in_time[~cell[in_time.index].duplicated(keep="last")]
    return last.set_axis(cell[last.index])


def _with_spread(summary: pd.DataFrame, good: pd.DataFrame, good_cell: pd.Series[int]) -> pd.DataFrame:
    """`n`, `n_of`, the interval and the range over repeats; repeats outrank the steps within one.

    A prediction has no samples, however many records say the same.
    """
    timed = good["n_steps"].notna()
    repeats = good_cell[timed].value_counts().reindex(summary.index, fill_value=0)
    several = repeats > 1
    summary["n"] = summary["n_steps"].where(~several, repeats)
    summary["n_of"] = several.map({True: "repeats", False: "steps"}).where(summary["n"].notna())
    by_cell = good.loc[timed, "tokens_per_s"].groupby(good_cell[timed])
    summary["tokens_per_s_lowest_repeat"] = by_cell.min().where(several)
    summary["tokens_per_s_highest_repeat"] = by_cell.max().where(several)
    summary.loc[several, INTERVALS] = None
    samples = good.loc[timed, "step_time_ms"].groupby(good_cell[timed]).agg(list)
    repeated = summary.index[several]
    ends = {
        number: (found.low, found.high, tokens_per_s(tokens, found.high), tokens_per_s(tokens, found.low))
        for number, times, tokens in zip(
            repeated, samples[repeated], summary.loc[repeated, "tokens_per_step"], strict=True
        )
        if (found := median_interval(times)) is not None
    }
    if ends:
        summary.loc[[*ends], INTERVALS] = [*ends.values()]
    return summary
