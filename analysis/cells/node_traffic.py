"""Which cells sent something from node to node, and what they are called whatever the network was."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import variants

NETWORK = "cluster.network"
SENT = "node_attention_bytes"


def crossing(summary: pd.DataFrame) -> pd.Series[bool]:
    """Per cell whether it ran on several nodes and it is known what left them."""
    return summary[SENT].notna()


def keys_but_network(cells: Cells) -> list[str]:
    """The columns that tell the series apart, beside strategy, length and the network's name."""
    return [key for key in cells.keys if key != NETWORK] if len(cells) else []


def named(cells: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Per cell its strategy and what these keys say of it."""
    return [
        f"{strategy}, {variant}" if variant else str(strategy)
        for strategy, variant in zip(cells["strategy"], variants(cells, keys), strict=True)
    ]
