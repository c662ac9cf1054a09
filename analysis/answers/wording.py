"""Names and lengths of cells as parts of sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.labels import count_label
from bench.common.labels import length_label

MAX_NAMES, MAX_LETTERS = 12, 400
"""Largest number of names, and of letters in all names, in a sentence. Beyond it, settings are counted."""
MAX_LENGTHS = 8


def names_at_lengths(cells: Cells, rows: pd.Series[bool]) -> str:
    """Return the cells in these rows as text: `ring at 8k and 64k; ulysses (sp 2) at 64k`."""
    pairs = zip(cells.names[rows], cells.frame.loc[rows, "seq_len"], strict=True)
    return join_places(lengths_by_name(pairs))


def lengths_by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, set[int]]:
    """Group pairs of name and length by name, such as `ring (sp 2)`.

    If there are too many names, group them by strategy: `ring (5 settings)`.
    """
    lengths_of_name: dict[str, set[int]] = {}
    for name, seq_len in pairs:
        lengths_of_name.setdefault(name, set()).add(int(seq_len))
    if len(lengths_of_name) <= MAX_NAMES and sum(map(len, lengths_of_name)) <= MAX_LETTERS:
        return {bracket_settings(name): lengths for name, lengths in lengths_of_name.items()}
    settings: dict[str, list[set[int]]] = {}
    for name, lengths in lengths_of_name.items():
        settings.setdefault(name.split(", ")[0], []).append(lengths)
    return {
        f"{strategy} ({count_label(len(lengths), 'setting')})": set().union(*lengths)
        for strategy, lengths in settings.items()
    }


def bracket_settings(name: str) -> str:
    """Return `ring (sp 2)` for `ring, sp 2`, so that the name can be an item of a list."""
    strategy, _, settings = name.partition(", ")
    return f"{strategy} ({settings})" if settings else name


def join_places(lengths_of_name: Mapping[str, set[int]]) -> str:
    """Return `ring at 8k and 64k; ulysses at 64k`."""
    return "; ".join(f"{name} at {join_lengths(lengths)}" for name, lengths in lengths_of_name.items())


def join_lengths(lengths: Iterable[int]) -> str:
    """Return `8k and 64k`, or for more than MAX_LENGTHS lengths only the ends: `1k to 64k`."""
    labels = [*map(length_label, sorted(lengths))]
    return join_words(labels) if len(labels) <= MAX_LENGTHS else f"{labels[0]} to {labels[-1]}"


def join_words(items: Iterable[str]) -> str:
    """Return `a`, `a and b` or `a, b and c`. There must be at least one item."""
    words = [*items]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
