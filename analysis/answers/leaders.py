"""Length by length: who led in a comparison, or what was measured where nobody may lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.selection import ALL_IN
from analysis.labels import more_label, number_label
from bench.labels import length_label

LEADER_COLUMNS = ("work", "name", "seq_len", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")
MAX_LINES = 100
MAX_FIGURES = 24


@dataclass(frozen=True, slots=True)
class Leader:
    """The cell with the most tokens/s among comparable ones."""

    name: str
    seq_len: int
    tokens_per_s: float
    runner_up: str | None
    """None where it was alone."""
    ratio: float | None
    is_clear: bool


def leaders(cells: Cells) -> list[Leader]:
    """Per length and kind of work the fastest cell, by length.

    It is clear when its interval lies above the runner-up's; without both intervals it is not.
    """
    rates = cells.frame[["seq_len", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]]
    timed = rates.assign(work=cells.work, name=cells.names)[rates["tokens_per_s"].notna()]
    first_two = timed.sort_values("tokens_per_s", ascending=False).groupby("work", sort=False).head(2)
    pairs: dict[int, list[dict[Any, Any]]] = {}
    for row in first_two[[*LEADER_COLUMNS]].to_dict("records"):
        pairs.setdefault(row["work"], []).append(row)
    return sorted((_leader(*pair) for pair in pairs.values()), key=lambda leader: leader.seq_len)


def leader_lines(found: Sequence[Leader]) -> list[str]:
    """A line for each comparison: who led, and by how much."""
    return _first([_detail(leader) for leader in found[:MAX_LINES]], len(found))


def measured_lines(cells: Cells) -> list[str]:
    """A line for each comparison that ranks nothing: its cells by name, each with its tokens/s."""
    timed = cells.frame.loc[cells.frame["tokens_per_s"].notna(), ["seq_len", "tokens_per_s"]]
    timed = timed.assign(name=cells.names, work=cells.work).sort_values(["seq_len", "work", "name"])
    groups = [rows for _, rows in timed.groupby(["seq_len", "work"])]
    return _first([_measured(rows) for rows in groups[:MAX_LINES]], len(groups))


def _measured(cells: pd.DataFrame) -> str:
    """`8k, in tokens/s: local: 21,217; ring, sp 2: 18,971`."""
    shown = cells.head(MAX_FIGURES)
    figures = [
        f"{name}: {number_label(rate)}"
        for name, rate in zip(shown["name"], shown["tokens_per_s"], strict=True)
    ]
    if len(cells) > MAX_FIGURES:
        figures.append(f"{more_label(len(cells) - MAX_FIGURES, 'cell')} in summary.csv")
    return f"{length_label(int(cells['seq_len'].iloc[0]))}, in tokens/s: {'; '.join(figures)}"


def _first(lines: list[str], count: int) -> list[str]:
    rest = count - len(lines)
    return [*lines, f"{more_label(rest, 'comparison')}; {ALL_IN}"] if rest else lines


def _detail(leader: Leader) -> str:
    start = f"{length_label(leader.seq_len)}: {leader.name}, {number_label(leader.tokens_per_s)} tokens/s"
    if leader.runner_up is None or leader.ratio is None:
        return f"{start}; nothing to compare it with"
    clear = "" if leader.is_clear else ", no clear difference"
    return f"{start}, {leader.ratio:.2f} times {leader.runner_up}{clear}"


def _leader(first: Mapping[Any, Any], second: Mapping[Any, Any] | None = None) -> Leader:
    common = (first["name"], int(first["seq_len"]), float(first["tokens_per_s"]))
    if second is None:
        return Leader(*common, None, None, is_clear=False)
    ratio = float(first["tokens_per_s"] / second["tokens_per_s"])
    is_clear = bool(first["tokens_per_s_low"] > second["tokens_per_s_high"])
    return Leader(*common, second["name"], ratio, is_clear)
