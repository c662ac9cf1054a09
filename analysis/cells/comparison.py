"""Which cells may be compared - same work, machine and provenance - and what each is over another."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.cells.capacity import with_capacity
from analysis.cells.prediction_errors import with_prediction_errors
from analysis.read.frame import config_columns
from analysis.read.step_parts import BEYOND_IDEAL, IDEAL
from bench.record.record import Provenance

BASE = "local"
SAME_ORIGIN = ("provenance", "device_name", "code", "torch")
FREE = frozenset(
    {
        *("strategy", "layout", "kernel", "sp_degree", "ulysses_degree", "ring_degree"),
        *("dp_replicate", "dp_shard", "batch", "grad_accum", "cluster", "seed", "padding"),
        *("trainer", "loss"),
    }
)
"""How the work is spread and who does it, not what work it is. Batches count through `sequences_per_step`; a
training stack computes the loss in its own way, and what it costs is its distance from the native loop."""
FREE_GROUPS = ("cluster.", "measure.", "env.", "strategy.", "replay.")
RANKS = "cluster.world_size"
FROM_BASE = ("cell_id", "strategy", RANKS, "tokens_per_s")
SCALING = ("scaling_base_cell_id", "scaling_base_strategy", "scaling_base_ranks", "scaling_speed_up")


def with_comparisons(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """The summary with capacities, speed-ups, scaling, ideal attention and errors of predictions."""
    compared = with_over_data_parallel(with_speed_up(with_capacity(summary), work), work)
    compared = with_scaling(compared, work)
    return with_prediction_errors(with_ideal_attention(compared, work))


def work_keys(summary: pd.DataFrame) -> list[str]:
    """The columns in which two cells must agree to be compared, less those that hold one value only.

    A key that is new to the configuration counts, so a comparison gets lost rather than goes wrong.
    """
    config = [key for key in config_columns(summary) if key not in FREE and not key.startswith(FREE_GROUPS)]
    keys = [*SAME_ORIGIN, "sequences_per_step", *dict.fromkeys(config)]
    return [key for key in keys if varies(summary, key)]


def varies(summary: pd.DataFrame, key: str) -> bool:
    """Whether the column holds more than one value, missing counting as one."""
    return len(summary[key].drop_duplicates()) > 1


def work_number(summary: pd.DataFrame, *, but: Sequence[str] = ()) -> pd.Series[int]:
    """Per row the number of the group of comparable cells it is in, leaving the keys `but` aside."""
    keys = [key for key in work_keys(summary) if key not in but]
    if not keys:
        return pd.Series(0, index=summary.index)
    return summary.groupby(keys, dropna=False, sort=False).ngroup()


def with_speed_up(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Adds `speed_up` against the fastest comparable `local` cell, and that cell's id and rank count.

    Missing where no `local` cell did the same `work` on the same machine with the same provenance.
    """
    bases = summary[(summary["strategy"] == BASE) & _has_a_rate(summary)]
    fastest = bases.loc[bases["tokens_per_s"].groupby(work[bases.index]).idxmax()]
    fastest = fastest.set_index(work[fastest.index])
    return summary.assign(
        speed_up=summary["tokens_per_s"] / work.map(fastest["tokens_per_s"]),
        speed_up_base_cell_id=work.map(fastest["cell_id"]),
        speed_up_base_ranks=work.map(fastest[RANKS]),
    )


def with_over_data_parallel(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Adds `over_data_parallel` and the id of the base: the fastest cell without sequence parallelism.

    The base has as many ranks and did the same `work`, so that a step holds as many tokens. Missing for cells
    that share no sequence, and where there is no base.
    """
    key, shares = summary.groupby([work, RANKS], dropna=False).ngroup(), summary["sp_degree"].gt(1)
    bases = summary[~shares & _has_a_rate(summary)]
    fastest = bases.loc[bases["tokens_per_s"].groupby(key[bases.index]).idxmax()]
    fastest = fastest.set_index(key[fastest.index])
    return summary.assign(
        over_data_parallel=(summary["tokens_per_s"] / key.map(fastest["tokens_per_s"])).where(shares),
        over_data_parallel_base_cell_id=key.map(fastest["cell_id"]).where(shares),
    )


def with_scaling(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Adds `scaling_speed_up` over a named base and `scaling_efficiency`, that over the ratio of ranks.

    The base is the cell with the fewest ranks that did the same `work`, the fastest of equals: `local`'s
    where it took no more ranks than the strategy's own fewest, else the strategy's own. The efficiency is
    also the tokens/s per rank over the base's. Missing where a strategy has results on one number of ranks
    only.
    """
    own = within_strategy(summary, work)
    timed = summary.loc[_has_a_rate(summary) & summary[RANKS].notna(), [*FROM_BASE]]
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
        **dict(zip(SCALING, values, strict=True)),
        scaling_efficiency=speed_up / (summary[RANKS] / base[RANKS]),
    )


def _has_a_rate(summary: pd.DataFrame) -> pd.Series[bool]:
    """Whether a cell has one rate that others may be divided by: a replay has a bracket."""
    return summary["tokens_per_s"].notna() & summary["provenance"].ne(Provenance.REPLAYED)


def within_strategy(summary: pd.DataFrame, work: pd.Series[int]) -> pd.Series[int]:
    """Per cell the number of the strategy and work that it shares with cells on other numbers of ranks."""
    return summary.groupby([work, "strategy"], sort=False).ngroup()


def _first_of_each(cells: pd.DataFrame, number: pd.Series[int]) -> pd.DataFrame:
    """The first of each group's cells, by the group's number."""
    numbers = number[cells.index]
    first = ~numbers.duplicated()
    return cells[first].set_index(numbers[first])


def with_ideal_attention(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Adds IDEAL, BEYOND_IDEAL and `ideal_attention_share`; missing without a `local` cell of the `work`."""
    attention_ms = summary["part_attention_ms"]
    spent_ms = attention_ms * _capacity(summary)
    key = summary.groupby([work, "kernel"], dropna=False).ngroup()
    bases = summary["strategy"].eq(BASE) & attention_ms.notna()
    best_ms = spent_ms[bases].groupby(key[bases]).min()
    ideal_ms = (key.map(best_ms).astype("float64") / _capacity(summary)).where(attention_ms.notna())
    columns = {IDEAL: ideal_ms, BEYOND_IDEAL: attention_ms - ideal_ms}
    return summary.assign(**columns, ideal_attention_share=ideal_ms / attention_ms)


def _capacity(summary: pd.DataFrame) -> pd.Series[float]:
    """What attention is spread over: GPUs, or the cores of all ranks together."""
    ranks, threads, sharing = (
        summary[key].astype("float64").fillna(1.0)
        for key in (RANKS, "cluster.threads_per_rank", "cluster.ranks_per_gpu")
    )
    return ranks * threads.where(summary["cluster.device"].eq("cpu"), 1.0 / sharing)
