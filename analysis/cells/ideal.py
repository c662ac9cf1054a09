"""Attention at its best: what `local` needed for the same work, spread over a cell's cores or GPUs."""

from __future__ import annotations

import pandas as pd

from analysis.cells.comparison import BASE
from analysis.metrics.step_parts import EFFICIENCY, IDEAL


def with_ideal_attention(summary: pd.DataFrame, work: pd.Series[int]) -> pd.DataFrame:
    """Adds the columns IDEAL and EFFICIENCY, missing where no `local` cell did the same `work`."""
    attention_ms = summary["part_attention_ms"]
    spent_ms = attention_ms * _capacity(summary)
    key = summary.groupby([work, "kernel"], dropna=False).ngroup() if "kernel" in summary.columns else work
    bases = summary["strategy"].eq(BASE) & attention_ms.notna()
    best_ms = spent_ms[bases].groupby(key[bases]).min()
    ideal_ms = (key.map(best_ms).astype("float64") / _capacity(summary)).where(attention_ms.notna())
    return summary.assign(**{IDEAL: ideal_ms, EFFICIENCY: attention_ms - ideal_ms})


def _capacity(summary: pd.DataFrame) -> pd.Series[float]:
    """What attention is spread over: GPUs, or the cores of all ranks together."""
    one = pd.Series(1.0, index=summary.index)
    ranks = summary.get("cluster.world_size", one).astype("float64")
    threads = summary.get("cluster.threads_per_rank", one).astype("float64")
    on_cpu = summary.get("cluster.device", pd.Series("cuda", index=summary.index)).eq("cpu")
    sharing = summary.get("cluster.ranks_per_gpu", one).fillna(1).astype("float64")
    return ranks * threads.where(on_cpu, 1.0 / sharing)
