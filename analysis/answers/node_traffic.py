"""What crossed the network between nodes, in sentences."""

from __future__ import annotations

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.node_traffic import crossing, keys_but_network, named
from analysis.cells.series import variant
from analysis.labels import bytes_label, more_label, percent_label, ratio_label
from bench.labels import length_label

MAX_SENTENCES = 4
LEFT = ("node_attention_bytes", "node_other_bytes")
PLACE = ["cluster.nodes", "cluster.world_size"]


def node_traffic_lines(cells: Cells) -> list[str]:
    """Who sends least and most of several that did the same work on as many nodes, a sentence each.

    Bytes grow alike with the length, so it is told at the longest; of too many the first.
    """
    shown = cells.part(crossing(cells.frame))
    if not len(shown):
        return []
    keys = keys_but_network(shown)
    found = shown.frame.assign(work=shown.work, left=shown.frame[[*LEFT]].sum(axis=1))
    groups = found.sort_values("seq_len", ascending=False, kind="stable").groupby(
        [*PLACE, "work"], sort=False
    )
    lines: dict[tuple[str, ...], str] = {}
    for _, group in groups:
        common = [key for key in keys if len(group[key].drop_duplicates()) == 1]
        own = [key for key in keys if key not in common]
        alike = group.assign(name=named(group, own)).drop_duplicates("name")
        if len(alike) > 1:
            setting = variant(alike.iloc[0], common)
            lines.setdefault((setting, *sorted(alike["name"])), _sentence(alike, setting))
    rest = [f"{more_label(len(lines) - MAX_SENTENCES, 'comparison')} in the table."]
    return [*lines.values()][:MAX_SENTENCES] + (rest if len(lines) > MAX_SENTENCES else [])


def _sentence(alike: pd.DataFrame, setting: str) -> str:
    by_bytes = alike.sort_values("left", kind="stable")
    least, most = by_bytes.iloc[0], by_bytes.iloc[-1]
    length, nodes = length_label(int(least["seq_len"])), int(least["cluster.nodes"])
    ranks = int(least["cluster.world_size"]) // nodes
    share = percent_label(least["node_attention_bytes"] / least["left"])
    where = f"{length}, {setting}" if setting else length
    fewest, largest = (bytes_label(each["left"]) for each in (least, most))
    return (
        f"Over the slow link at {where} on {nodes} nodes of {ranks} ranks: least leaves a node with"
        f" {least['name']}, {fewest} a step ({share} of it attention's), most with {most['name']}, {largest},"
        f" {ratio_label(most['left'] / least['left'])} times as much."
    )
