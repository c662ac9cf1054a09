"""One row per cell: the repeats of a cell reduced to their median, its spread, and all of it as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.read.metrics import Reduction, metrics_reduced
from analysis.read.results import tokens_per_s
from bench.common.statistics import median_interval

CELL = ["cell_id", "provenance", "hardware", "device_name", "code", "torch"]
"""What makes two records repeats of one another: the same request on the same machine and software."""

MEDIANS, RATES, FIRSTS = map(metrics_reduced, (Reduction.MEDIAN, Reduction.RATE, Reduction.FIRST))
FIRSTS_OF_ALL = metrics_reduced(Reduction.FIRST_OF_ALL)
LOWEST, HIGHEST, TOTALS = map(metrics_reduced, (Reduction.LOWEST, Reduction.HIGHEST, Reduction.TOTAL))
INTERVALS = ["step_time_low_ms", "step_time_high_ms", "tokens_per_s_low", "tokens_per_s_high"]
OF_PROCESSES = ("tokens_per_s", "tokens_per_s_with_link", "started_at")
OF_ONE_REPEAT = frozenset({"repeat", "order"})
ORDER = ["seq_len", "strategy", "cluster.world_size", "sp_degree", "engine", "layout", "dtype"]
FORMULA_STARTS = ("=", "+", "-", "@", "\t")


@dataclass(frozen=True, eq=False, slots=True)
class Summary:
    """The cells behind a frame of records."""

    rows: pd.DataFrame
    """One row per cell."""
    processes: pd.DataFrame
    """Per process that gave a speed OF_PROCESSES, by the row of its cell."""


def summarise(frame: pd.DataFrame) -> Summary:
    """One row per cell, by length and then strategy, and the processes behind it.

    Adds `repeats`, `failed_repeats`, `n` with `n_of` (what the interval's samples are: steps of the only
    repeat, or repeats) and the lowest and highest repeat's tokens per second. `status` and `reason` are
    those of a failed repeat where there is one, `started_at` is the last repeat's.
    """
    cell = _cell_numbers(frame)
    failed = frame["status"] != "ok"
    shown = _shown_rows(frame, cell, failed)
    columns = [key for key in frame.columns if key not in OF_ONE_REPEAT]
    summary = frame.loc[shown, columns].set_index(cell[shown])
    summary[RATES] = 1 / (1 / summary[RATES])  # rounded as rates over repeats are
    is_repeat = cell.duplicated(keep=False)
    if is_repeat.any():
        reduced = _reduced(frame[is_repeat], cell[is_repeat])
        summary.loc[reduced.index, reduced.columns] = reduced
    summary["repeats"] = cell.value_counts()
    summary["failed_repeats"] = failed.groupby(cell).sum()
    rows = _with_spread(summary, frame, cell)
    return Summary(rows.reset_index(drop=True), _processes(frame, cell, rows.index))


def _reduced(frame: pd.DataFrame, cell: pd.Series[int]) -> pd.DataFrame:
    """By a cell's number its records as one; those that failed have no figures that could count."""
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
    """Those of Summary, of cells that stand in this order."""
    gave_speed = frame["tokens_per_s"].notna() & (frame["status"] == "ok")
    row = pd.Series(range(len(cells_in_order)), index=cells_in_order, dtype="int64")
    processes = frame.loc[gave_speed, [*OF_PROCESSES]]
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
    """Return, by a cell's number, when the last of its records was started."""
    in_time = started_at.sort_values(kind="stable")
    last = in_time[~cell[in_time.index].duplicated(keep="last")]
    return last.set_axis(cell[last.index])


def _with_spread(summary: pd.DataFrame, frame: pd.DataFrame, cell: pd.Series[int]) -> pd.DataFrame:
    """`n`, `n_of`, the interval and the range over repeats; repeats outrank the steps within one.

    A prediction has no samples, however many records say the same.
    """
    timed = frame["n_steps"].notna()
    repeats = cell[timed].value_counts().reindex(summary.index, fill_value=0)
    several = repeats > 1
    summary["n"] = summary["n_steps"].where(~several, repeats)
    summary["n_of"] = several.map({True: "repeats", False: "steps"}).where(summary["n"].notna())
    repeated = summary.index[several]
    runs = frame.loc[timed & cell.isin(repeated), ["tokens_per_s", "step_time_ms"]]
    own = cell[runs.index]
    summary["tokens_per_s_lowest_repeat"] = runs["tokens_per_s"].groupby(own).min()
    summary["tokens_per_s_highest_repeat"] = runs["tokens_per_s"].groupby(own).max()
    summary.loc[several, INTERVALS] = None
    ends = _interval_ends(own, runs["step_time_ms"], summary.loc[repeated, "tokens_per_step"])
    if ends:
        summary.loc[[*ends], INTERVALS] = [*ends.values()]
    return summary


def _interval_ends(
    cell: pd.Series[int], step_time_ms: pd.Series[float], tokens_per_step: pd.Series[float]
) -> dict[int, tuple[float, ...]]:
    """By a cell's number the INTERVALS of its repeats; none of a cell that has too few."""
    found = {number: median_interval([*times]) for number, times in step_time_ms.groupby(cell)}
    return {
        number: (
            interval.low,
            interval.high,
            tokens_per_s(tokens_per_step[number], interval.high),
            tokens_per_s(tokens_per_step[number], interval.low),
        )
        for number, interval in found.items()
        if interval is not None
    }


def csv_text(summary: pd.DataFrame) -> str:
    """All columns of the summary; missing is empty, and no text cell is a spreadsheet formula."""
    written = {name: _writable(column) for name, column in summary.items()}
    return pd.DataFrame(written, columns=summary.columns).to_csv(index=False, lineterminator="\n")


def _writable(column: pd.Series[Any]) -> pd.Series[Any]:
    """The column with whole bytes and harmless texts."""
    if pd.api.types.is_bool_dtype(column):
        return column
    if pd.api.types.is_numeric_dtype(column):
        return column.round().astype("Int64") if str(column.name).endswith("_bytes") else column
    return column.map(_harmless)


def _harmless(value: Any) -> Any:
    """A text without what a spreadsheet computes, and with line ends that CSV readers agree on."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
