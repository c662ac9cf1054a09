"""Reduces the repeats of each cell to one row, with its spread, and writes the rows as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.read.metrics import Reduction, metrics_reduced
from analysis.read.results import tokens_per_s
from bench.common.statistics import median_interval

CELL_KEY = ["cell_id", "provenance", "hardware", "device_name", "code", "torch"]
"""Columns in which repeats of a cell agree: the same request, machine and software."""

# names of the metrics, by their reduction over repeats
MEDIANS, RATES, FIRSTS = map(metrics_reduced, (Reduction.MEDIAN, Reduction.RATE, Reduction.FIRST))
FIRSTS_OF_ALL = metrics_reduced(Reduction.FIRST_OF_ALL)
LOWEST, HIGHEST, TOTALS = map(metrics_reduced, (Reduction.LOWEST, Reduction.HIGHEST, Reduction.TOTAL))
INTERVALS = ["step_time_low_ms", "step_time_high_ms", "tokens_per_s_low", "tokens_per_s_high"]
PROCESS_COLUMNS = ("tokens_per_s", "tokens_per_s_with_link", "started_at")
REPEAT_COLUMNS = frozenset({"repeat", "order"})
ROW_ORDER = ["seq_len", "strategy", "cluster.world_size", "sp_degree", "engine", "layout", "dtype"]
FORMULA_STARTS = ("=", "+", "-", "@", "\t")


@dataclass(frozen=True, eq=False, slots=True)
class Summary:
    """Cells of a frame of records, and the processes behind their speeds."""

    rows: pd.DataFrame
    """One row per cell."""
    processes: pd.DataFrame
    """PROCESS_COLUMNS of each process that gave a speed, indexed by the row of its cell."""


def summarise(frame: pd.DataFrame) -> Summary:
    """Return one row per cell, by length and then strategy, and the processes behind it.

    Adds `repeats`, `failed_repeats`, `n` samples of the interval, `n_of` (`steps` of the only repeat, or
    `repeats`), and the tokens/s of the slowest and the fastest repeat. `status` and `reason` are those of a
    failed repeat where there is one. `started_at` is that of the last repeat.
    """
    cell = _cell_numbers(frame)
    failed = frame["status"] != "ok"
    shown = _shown_rows(frame, cell, failed)
    columns = [key for key in frame.columns if key not in REPEAT_COLUMNS]
    summary = frame.loc[shown, columns].set_index(cell[shown])
    summary[RATES] = 1 / (1 / summary[RATES])  # the same rounding as for rates of several repeats
    is_repeat = cell.duplicated(keep=False)
    if is_repeat.any():
        reduced = _reduce_repeats(frame[is_repeat], cell[is_repeat])
        summary.loc[reduced.index, reduced.columns] = reduced
    summary["repeats"] = cell.value_counts()
    summary["failed_repeats"] = failed.groupby(cell).sum()
    rows = _with_spread(summary, frame, cell)
    return Summary(rows.reset_index(drop=True), _processes(frame, cell, rows.index))


def _reduce_repeats(frame: pd.DataFrame, cell: pd.Series[int]) -> pd.DataFrame:
    """Return one row per cell number, reduced from its records. Failed records have no values to reduce."""
    repeats = frame.groupby(cell)
    return pd.concat(
        [
            repeats[MEDIANS].median(),
            1 / (1 / frame[RATES]).groupby(cell).median(),
            repeats[LOWEST].min(),
            repeats[HIGHEST].max(),
            repeats[TOTALS].sum(min_count=1),
            repeats[[*FIRSTS, *FIRSTS_OF_ALL]].first(),
            _last_starts(frame["started_at"], cell),
        ],
        axis=1,
    )


def _processes(frame: pd.DataFrame, cell: pd.Series[int], cells_in_order: pd.Index[int]) -> pd.DataFrame:
    """Return `Summary.processes`; `cells_in_order` has the cells' numbers in the order of `Summary.rows`."""
    gave_speed = frame["tokens_per_s"].notna() & (frame["status"] == "ok")
    row = pd.Series(range(len(cells_in_order)), index=cells_in_order, dtype="int64")
    processes = frame.loc[gave_speed, [*PROCESS_COLUMNS]]
    return processes.set_index(cell[gave_speed].map(row)).sort_index(kind="stable")


def _cell_numbers(frame: pd.DataFrame) -> pd.Series[int]:
    """Return the number of each record's cell, in order of first appearance."""
    return frame.groupby(CELL_KEY, dropna=False, sort=False).ngroup()


def _shown_rows(frame: pd.DataFrame, cell: pd.Series[int], failed: pd.Series[bool]) -> pd.Index[int]:
    """Return the row that represents each cell, sorted by ROW_ORDER: the first failed row, else the first."""
    failed_first = failed.sort_values(ascending=False, kind="stable").index
    first = failed_first[~cell[failed_first].duplicated()]
    return frame.loc[first, ROW_ORDER].sort_values(ROW_ORDER, kind="stable").index


def _last_starts(started_at: pd.Series[str], cell: pd.Series[int]) -> pd.Series[str]:
    """Return the start of each cell's last record, indexed by the cell's number."""
    in_time = started_at.sort_values(kind="stable")
    last = in_time[~cell[in_time.index].duplicated(keep="last")]
    return last.set_axis(cell[last.index])


def _with_spread(summary: pd.DataFrame, frame: pd.DataFrame, cell: pd.Series[int]) -> pd.DataFrame:
    """Add `n`, `n_of`, the interval and the range over repeats to the summary.

    With several timed repeats the samples are repeats, else steps. A prediction has no samples.
    """
    timed = frame["n_steps"].notna()
    repeats = cell[timed].value_counts().reindex(summary.index, fill_value=0)
    several = repeats > 1
    summary["n"] = summary["n_steps"].where(~several, repeats)
    summary["n_of"] = several.map({True: "repeats", False: "steps"}).where(summary["n"].notna())
    repeated = summary.index[several]
    runs = frame.loc[timed & cell.isin(repeated), ["tokens_per_s", "step_time_ms"]]
    cell_of_run = cell[runs.index]
    summary["tokens_per_s_lowest_repeat"] = runs["tokens_per_s"].groupby(cell_of_run).min()
    summary["tokens_per_s_highest_repeat"] = runs["tokens_per_s"].groupby(cell_of_run).max()
    summary.loc[several, INTERVALS] = None
    ends = _interval_ends(cell_of_run, runs["step_time_ms"], summary.loc[repeated, "tokens_per_step"])
    if ends:
        summary.loc[[*ends], INTERVALS] = [*ends.values()]
    return summary


def _interval_ends(
    cell: pd.Series[int], step_time_ms: pd.Series[float], tokens_per_step: pd.Series[float]
) -> dict[int, tuple[float, ...]]:
    """Return the INTERVALS of each cell's repeats, by the cell's number; cells with too few are left out."""
    intervals = {number: median_interval([*times]) for number, times in step_time_ms.groupby(cell)}
    return {
        number: (
            interval.low,
            interval.high,
            tokens_per_s(tokens_per_step[number], interval.high),
            tokens_per_s(tokens_per_step[number], interval.low),
        )
        for number, interval in intervals.items()
        if interval is not None
    }


def csv_text(summary: pd.DataFrame) -> str:
    """Return the summary as CSV, in which missing values are empty and no text is a spreadsheet formula."""
    columns = {name: _csv_column(column) for name, column in summary.items()}
    return pd.DataFrame(columns, columns=summary.columns).to_csv(index=False, lineterminator="\n")


def _csv_column(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return the column with bytes as whole numbers and texts as `_csv_value` returns them."""
    if pd.api.types.is_bool_dtype(column):
        return column
    if pd.api.types.is_numeric_dtype(column):
        return column.round().astype("Int64") if str(column.name).endswith("_bytes") else column
    return column.map(_csv_value)


def _csv_value(value: Any) -> Any:
    """Return a text that no spreadsheet takes for a formula, with line ends that all CSV readers accept."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
