"""Strong scaling: what more ranks gain at equal work."""

from __future__ import annotations

import pandas as pd

from analysis.cells.comparison import BASE, work_number

RANKS = "cluster.world_size"
FROM_BASE = ("cell_id", "strategy", RANKS, "tokens_per_s")
COLUMNS = ("scaling_base_cell_id", "scaling_base_strategy", "scaling_base_ranks", "scaling_speed_up")


def scaling_group(summary: pd.DataFrame) -> pd.Series[int]:
    """Per cell the number of the strategy and work that it shares with cells on other numbers of ranks."""
    return _within_strategy(summary, work_number(summary))


def with_scaling(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Adds `scaling_speed_up` over a named base and `scaling_efficiency`, that over the ratio of ranks.

    The base is the cell with the fewest ranks that did the same `work`, the fastest of equals: `local`'s
    where it took no more ranks than the strategy's own fewest, else the strategy's own. The efficiency is
    also the tokens/s per rank over the base's. Missing where a strategy has results on one number of ranks
    only.
    """
    if RANKS not in summary.columns:
        return summary.assign(**dict.fromkeys([*COLUMNS, "scaling_efficiency"]))
    own = _within_strategy(summary, work)
    timed = summary.loc[summary["tokens_per_s"].notna() & summary[RANKS].notna(), [*FROM_BASE]]
    timed = timed.sort_values([RANKS, "tokens_per_s"], ascending=[True, False], kind="stable")
    own_base = _first_of_each(timed, own)
    local_base = _first_of_each(timed[timed["strategy"] == BASE], work)
    own_fewest, local_fewest = own.map(own_base[RANKS]), work.map(local_base[RANKS])
    is_local = local_fewest <= own_fewest
    scales = own.map(timed[RANKS].groupby(own[timed.index]).nunique()) > 1
    base = {
        key: work.map(local_base[key]).where(is_local, own.map(own_base[key])).where(scales)
        for key in FROM_BASE
    }
    speed_up = summary["tokens_per_s"] / base["tokens_per_s"]
    values = (base["cell_id"], base["strategy"], base[RANKS], speed_up)
    return summary.assign(
        **dict(zip(COLUMNS, values, strict=True)),
        scaling_efficiency=speed_up / (summary[RANKS] / base[RANKS]),
    )


def _within_strategy(summary: pd.DataFrame, work: pd.Series[int]) -> pd.Series[int]:
    return summary.groupby([work, "strategy"], sort=False).ngroup()


def _first_of_each(cells: pd.DataFrame, number: pd.Series[int]) -> pd.DataFrame:
    """The first of each group's cells, by the group's number."""
    numbers = number[cells.index]
    first = ~numbers.duplicated()
    return cells[first].set_index(numbers[first])
