"""Groups cells by workload, machine and provenance, and computes the ratios between comparable cells.

The base of a ratio is the cell that others are divided by. `work` is the number of each cell's group of
comparable cells, as `work_number` returns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.cells.capacity import with_capacity
from analysis.cells.prediction_errors import with_prediction_errors
from analysis.read.frame import config_columns
from analysis.read.step_parts import BEYOND_IDEAL, IDEAL
from bench.record.record import Provenance

BASE_STRATEGY = "local"
SAME_ORIGIN = ("provenance", "device_name", "code", "torch")
FREE_SETTINGS = frozenset(
    {
        *("strategy", "layout", "kernel", "sp_degree", "ulysses_degree", "ring_degree"),
        *("dp_replicate", "dp_shard", "batch", "grad_accum", "cluster", "seed", "padding"),
        *("trainer", "loss"),
    }
)
"""Settings in which comparable cells may differ: they distribute the workload and do not change it. Batch and
degrees are compared by their product, `sequences_per_step`. A trainer may compute the loss in its own way,
because the cost of the loss is part of its speed."""
FREE_PREFIXES = ("cluster.", "measure.", "env.", "strategy.", "replay.")
RANKS = "cluster.world_size"
BASE_COLUMNS = ("cell_id", "strategy", RANKS, "tokens_per_s")
SCALING_COLUMNS = ("scaling_base_cell_id", "scaling_base_strategy", "scaling_base_ranks", "scaling_speed_up")


def with_comparisons(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Add capacities, speed-ups, scaling, ideal attention and errors of predictions to the summary."""
    compared = with_over_data_parallel(with_speed_up(with_capacity(summary), work), work)
    compared = with_scaling(compared, work)
    return with_prediction_errors(with_ideal_attention(compared, work))


def work_keys(summary: pd.DataFrame) -> list[str]:
    """Return the columns in which two cells must agree to be compared, without those equal in all cells.

    A new setting of the configuration is among them until it is added to FREE_SETTINGS, so that a comparison
    is left out rather than wrong.
    """
    config = [
        key
        for key in config_columns(summary)
        if key not in FREE_SETTINGS and not key.startswith(FREE_PREFIXES)
    ]
    keys = [*SAME_ORIGIN, "sequences_per_step", *dict.fromkeys(config)]
    return [key for key in keys if varies(summary, key)]


def varies(summary: pd.DataFrame, key: str) -> bool:
    """Return whether the column holds more than one value, where missing counts as a value."""
    return len(summary[key].drop_duplicates()) > 1


def work_number(summary: pd.DataFrame, *, ignored: Sequence[str] = ()) -> pd.Series[int]:
    """Return the number of each row's group of comparable cells, which may differ in the `ignored` keys."""
    keys = [key for key in work_keys(summary) if key not in ignored]
    if not keys:
        return pd.Series(0, index=summary.index)
    return summary.groupby(keys, dropna=False, sort=False).ngroup()


def with_speed_up(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Add `speed_up` over the fastest comparable `local` cell, and that cell's id and number of ranks.

    The columns are missing where no `local` cell has the same `work`, which includes machine and provenance.
    """
    bases = summary[(summary["strategy"] == BASE_STRATEGY) & _has_speed(summary)]
    fastest = bases.loc[bases["tokens_per_s"].groupby(work[bases.index]).idxmax()]
    fastest = fastest.set_index(work[fastest.index])
    return summary.assign(
        speed_up=summary["tokens_per_s"] / work.map(fastest["tokens_per_s"]),
        speed_up_base_cell_id=work.map(fastest["cell_id"]),
        speed_up_base_ranks=work.map(fastest[RANKS]),
    )


def with_over_data_parallel(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Add `over_data_parallel`, the speed over that of a base without sequence parallelism, and its id.

    The base is the fastest cell with the same number of ranks and the same `work`, and therefore the same
    number of tokens in a step. The columns are missing for cells without sequence parallelism and where there
    is no base.
    """
    key, has_sp = summary.groupby([work, RANKS], dropna=False).ngroup(), summary["sp_degree"].gt(1)
    bases = summary[~has_sp & _has_speed(summary)]
    fastest = bases.loc[bases["tokens_per_s"].groupby(key[bases.index]).idxmax()]
    fastest = fastest.set_index(key[fastest.index])
    return summary.assign(
        over_data_parallel=(summary["tokens_per_s"] / key.map(fastest["tokens_per_s"])).where(has_sp),
        over_data_parallel_base_cell_id=key.map(fastest["cell_id"]).where(has_sp),
    )


def with_scaling(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Add `scaling_speed_up` over a base cell, `scaling_efficiency`, and the base's id, strategy and ranks.

    The base has the same `work` and the fewest ranks; of several such cells it is the fastest. It is a cell
    of `local`, unless the strategy has a cell with fewer ranks or there is no `local`; then it is a cell of
    the strategy. The efficiency is the speed-up over the ratio of ranks, which equals the tokens/s per rank
    over those of the base. The columns are missing where a strategy has results on only one number of ranks.
    """
    strategy_number = strategy_work_number(summary, work)
    timed = summary.loc[_has_speed(summary) & summary[RANKS].notna(), [*BASE_COLUMNS]]
    timed = timed.sort_values([RANKS, "tokens_per_s"], ascending=[True, False], kind="stable")
    strategy_base = _first_of_groups(timed, strategy_number)
    local_base = _first_of_groups(timed[timed["strategy"] == BASE_STRATEGY], work)
    is_local = work.map(local_base[RANKS]) <= strategy_number.map(strategy_base[RANKS])
    scales = strategy_number.map(timed[RANKS].groupby(strategy_number[timed.index]).nunique()) > 1
    base = {
        key: work.map(local_base[key]).where(is_local, strategy_number.map(strategy_base[key])).where(scales)
        for key in BASE_COLUMNS
    }
    speed_up = summary["tokens_per_s"] / base["tokens_per_s"]
    values = (base["cell_id"], base["strategy"], base[RANKS], speed_up)
    return summary.assign(
        **dict(zip(SCALING_COLUMNS, values, strict=True)),
        scaling_efficiency=speed_up / (summary[RANKS] / base[RANKS]),
    )


def _has_speed(summary: pd.DataFrame) -> pd.Series[bool]:
    """Return whether each cell has a single speed to divide by; a replay has a range."""
    return summary["tokens_per_s"].notna() & summary["provenance"].ne(Provenance.REPLAYED)


def strategy_work_number(summary: pd.DataFrame, work: pd.Series[int]) -> pd.Series[int]:
    """Return the number of each cell's group of comparable cells of one strategy, on any number of ranks."""
    return summary.groupby([work, "strategy"], sort=False).ngroup()


def _first_of_groups(cells: pd.DataFrame, number: pd.Series[int]) -> pd.DataFrame:
    """Return the first cell of each group, indexed by the group's number."""
    numbers = number[cells.index]
    first = ~numbers.duplicated()
    return cells[first].set_index(numbers[first])


def with_ideal_attention(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Add IDEAL, BEYOND_IDEAL and `ideal_attention_share`, which is ideal over measured attention.

    They are missing where no `local` cell has the same work and kernel.
    """
    attention_ms = summary["part_attention_ms"]
    spent_ms = attention_ms * _compute_units(summary)
    key = summary.groupby([work, "kernel"], dropna=False).ngroup()
    bases = summary["strategy"].eq(BASE_STRATEGY) & attention_ms.notna()
    best_ms = spent_ms[bases].groupby(key[bases]).min()
    ideal_ms = (key.map(best_ms).astype("float64") / _compute_units(summary)).where(attention_ms.notna())
    columns = {IDEAL: ideal_ms, BEYOND_IDEAL: attention_ms - ideal_ms}
    return summary.assign(**columns, ideal_attention_share=ideal_ms / attention_ms)


def _compute_units(summary: pd.DataFrame) -> pd.Series[float]:
    """Return the number of GPUs, or on a CPU the cores of all ranks, that share attention's work."""
    ranks, threads, sharing = (
        summary[key].astype("float64").fillna(1.0)
        for key in (RANKS, "cluster.threads_per_rank", "cluster.ranks_per_gpu")
    )
    return ranks * threads.where(summary["cluster.device"].eq("cpu"), 1.0 / sharing)
