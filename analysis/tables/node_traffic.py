"""What crossed the network between nodes: the cells that ran on several, as rows of text."""

from __future__ import annotations

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.node_traffic import NETWORK, crossing, keys_but_network, named
from analysis.metrics.definitions import text_of
from bench.labels import length_label

HEADINGS = (
    "strategy", "length", "nodes x ranks", "network", "attention leaves a node", "the rest", "step time (ms)",
    "rate over the step",
)  # fmt: skip
COLUMNS = (
    "strategy", "seq_len", "cluster.nodes", NETWORK, "node_attention_bytes", "node_other_bytes",
    "step_time_ms", "node_bytes_per_s",
)  # fmt: skip
"""The summary's column behind each of HEADINGS."""
SHORT_HEADINGS = ("strategy", "length", "nodes", "network", "attention", "rest", "step ms", "rate")
"""The same for a terminal."""
READING = (
    "Payload that one node sends to others in a step, by the formula. Rate over the step: all of it over the"
    " step's time, which the link had on average; where that is near what the link can do, it sets the pace."
)


def node_traffic_rows(cells: Cells) -> list[tuple[str, ...]]:
    """In the order of HEADINGS; none where every cell ran on one node."""
    shown = cells.part(crossing(cells.frame))
    names = named(shown.frame, keys_but_network(shown))
    return [
        (
            name,
            length_label(int(cell["seq_len"])),
            f"{int(cell['cluster.nodes'])} x {int(cell['cluster.world_size'] // cell['cluster.nodes'])}",
            "" if pd.isna(cell[NETWORK]) else str(cell[NETWORK]),
            *(text_of(cell, column) for column in COLUMNS[4:]),
        )
        for name, cell in zip(names, shown.rows, strict=True)
    ]
