"""Names and lengths of cells as parts of sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.labels import count_label
from bench.common.labels import length_label

MAX_NAMES, MAX_LETTERS = 12, 400
"""A sentence with more names, or more letters of names, names strategies and counts their settings."""
MAX_LENGTHS = 8


def names_at_lengths(cells: Cells, rows: pd.Series[bool]) -> str:
    """Return some of the cells by name: `ring at 8k and 64k; ulysses at 64k`."""
    return listed_places(
        lengths_by_name(zip(cells.names[rows], cells.frame.loc[rows, "seq_len"], strict=True))
    )


def lengths_by_name(cells: Iterable[tuple[str, Any]]) -> dict[str, set[int]]:
    """Return the lengths of each name, or where names are too many, those of `ring (5 settings)`."""
    where: dict[str, set[int]] = {}
    for name, seq_len in cells:
        where.setdefault(name, set()).add(int(seq_len))
    if len(where) <= MAX_NAMES and sum(map(len, where)) <= MAX_LETTERS:
        return where
    settings: dict[str, list[set[int]]] = {}
    for name, lengths in where.items():
        settings.setdefault(name.split(", ")[0], []).append(lengths)
    return {
        f"{strategy} ({count_label(len(each), 'setting')})": set().union(*each)
        for strategy, each in settings.items()
    }


def listed_places(where: Mapping[str, set[int]]) -> str:
    """Return `ring at 8k and 64k; ulysses at 64k`."""
    return "; ".join(f"{name} at {listed_lengths(lengths)}" for name, lengths in where.items())


def listed_lengths(lengths: Iterable[int]) -> str:
    """Return `8k and 64k`; only first and last of many."""
    labels = [*map(length_label, sorted(lengths))]
    return listed(labels) if len(labels) <= MAX_LENGTHS else f"{labels[0]} to {labels[-1]}"


def listed(items: Iterable[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    words = [*items]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
