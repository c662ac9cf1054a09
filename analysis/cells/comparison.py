"""Which cells may be compared: the same work, on the same machine, of the same provenance."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.frame.load import config_columns

BASE = "local"
SAME_MACHINE = ("provenance", "device_name")
FREE = frozenset(
    {
        *("strategy", "layout", "kernel", "sp_degree", "ulysses_degree", "ring_degree"),
        *("dp_replicate", "dp_shard", "batch", "grad_accum", "cluster", "seed"),
    }
)
"""How the work is spread, not what work it is. Batches count through `sequences_per_step`."""
FREE_GROUPS = ("cluster.", "measure.", "env.", "strategy.")


def work_keys(summary: pd.DataFrame) -> list[str]:
    """The columns in which two cells must agree to be compared, less those that hold one value only.

    A key that is new to the configuration counts, so a comparison gets lost rather than goes wrong.
    """
    config = [key for key in config_columns(summary) if key not in FREE and not key.startswith(FREE_GROUPS)]
    keys = [*SAME_MACHINE, "sequences_per_step", *dict.fromkeys(config)]
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
    bases = summary[(summary["strategy"] == BASE) & summary["tokens_per_s"].notna()]
    fastest = bases.loc[bases["tokens_per_s"].groupby(work[bases.index]).idxmax()]
    fastest = fastest.set_index(work[fastest.index])
    with_ranks = "cluster.world_size" in summary.columns
    return summary.assign(
        speed_up=summary["tokens_per_s"] / work.map(fastest["tokens_per_s"]),
        speed_up_base_cell_id=work.map(fastest["cell_id"]),
        speed_up_base_ranks=work.map(fastest["cluster.world_size"]) if with_ranks else None,
    )
