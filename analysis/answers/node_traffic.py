"""What crossed the network between nodes, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.node_traffic import crossing, names_without_network
from analysis.labels import bytes_label, more_label, percent_label, ratio_label
from bench.labels import length_label

MAX_SENTENCES = 4
PLACE = ["cluster.nodes", "cluster.world_size"]


def node_traffic_lines(cells: Cells) -> list[str]:
    """A sentence for each work and number of nodes that several strategies did, the first of too many."""
    shown = cells.part(crossing(cells.frame))
    if not len(shown):
        return []
    frame = shown.frame.assign(name=names_without_network(shown), work=shown.work)
    frame = frame.assign(left=frame["node_attention_bytes"] + frame["node_other_bytes"])
    groups = frame.drop_duplicates([*PLACE, "work", "name"]).groupby([*PLACE, "work"], sort=False)
    lines = [line for _, group in groups for line in _sentence(group)]
    rest = len(lines) - MAX_SENTENCES
    more = [f"{more_label(rest, 'sentence')} would follow from the table."] if rest > 0 else []
    return [*lines[:MAX_SENTENCES], *more]


def _sentence(alike: pd.DataFrame) -> Iterator[str]:
    """Who sent least over the slow link and who most, of cells that did the same work on as many nodes."""
    if len(alike) == 1:
        return
    by_bytes = alike.sort_values("left", kind="stable")
    least, most = by_bytes.iloc[0], by_bytes.iloc[-1]
    length, nodes = length_label(int(least["seq_len"])), int(least["cluster.nodes"])
    ranks = int(least["cluster.world_size"]) // nodes
    share = percent_label(least["node_attention_bytes"] / least["left"])
    fewest, largest = (bytes_label(each["left"]) for each in (least, most))
    yield (
        f"Over the slow link at {length} on {nodes} nodes of {ranks} ranks: least leaves a node with"
        f" {least['name']}, {fewest} a step ({share} of it attention's), most with {most['name']}, {largest},"
        f" {ratio_label(most['left'] / least['left'])} times as much."
    )
