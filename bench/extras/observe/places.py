"""Order of the tokens that several ranks hold, derived from their positions, and the documents among them.

A token's place is its index in the whole row, which all ranks' shards make up. Its position is the number
that the model was given for it. Both differ where positions restart, as in packed documents and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from bench.attention.layouts import LAYOUTS

ROW_FACTOR = 2**20
"""Factor between the rows of positions that are combined into one number; positions of images are smaller."""
EQUAL_ROWS = 1 + ROW_FACTOR + ROW_FACTOR**2
"""Combined number of position 1 in all rows."""
Row = Sequence[int]
"""Positions of one sequence on one rank."""


def find_places(shards: Sequence[Sequence[Row]]) -> list[int] | None:
    """Return the places of all ranks' tokens, in rank order; None if the positions do not determine them.

    Positions that restart are documents. The places are then those of the first built-in layout in which
    positions count up within each document. Any other such layout only moves whole documents.

    Args:
        shards: Positions of every sequence on every rank, [ranks][sequences][tokens].
    """
    rows = [[position for row in parts for position in row] for parts in zip(*shards, strict=True)]
    count = len(rows[0])
    if all(sorted(row) == [*range(count)] for row in rows):
        return rows[0] if all(row == rows[0] for row in rows) else None
    if max(map(max, rows)) >= ROW_FACTOR:
        return _places_of_combined(rows[0])
    for first_positions in ((0,), (0, 1)):  # transformers gives padding in front of a text position 1
        for _, parts in layout_shards(count, len(shards)):
            places = [place for part in parts for place in part]
            if all(_restarts_only_at(first_positions, order(row, places)) for row in rows):
                return places
    return None


def order(values: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the values in the order of their places."""
    ordered = [0] * len(places)
    for value, place in zip(values, places, strict=True):
        ordered[place] = value
    return ordered


def document_starts(positions: Sequence[int]) -> list[int]:
    """Return, for every token of a row in order, the place where its document starts.

    Positions of images, which combine several rows, are one document.
    """
    starts, start = [0], 0
    is_combined = max(positions) >= ROW_FACTOR
    for place, (before, position) in enumerate(pairwise(positions), 1):
        start = start if is_combined or position == before + 1 else place
        starts.append(start)
    return starts


def _places_of_combined(codes: Sequence[int]) -> list[int] | None:
    """Return the places of tokens with combined positions, which grow along a sequence.

    On a rank whose rows are equal, positions are not combined yet.
    """
    combined = [code if code >= ROW_FACTOR else code * EQUAL_ROWS for code in codes]
    place_of = {code: place for place, code in enumerate(sorted(combined))}
    return [place_of[code] for code in combined] if len(place_of) == len(codes) else None


def layout_shards(tokens: int, ranks: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the name of every built-in layout that divides a row, and the places of each rank's tokens."""
    for layout in LAYOUTS.values():
        if tokens % layout.length_multiple(ranks) == 0:
            shards = (layout.slices(tokens, ranks, rank) for rank in range(ranks))
            places = [[place for piece in shard for place in range(tokens)[piece]] for shard in shards]
            yield layout.name, places


def _restarts_only_at(first_positions: Sequence[int], positions: Sequence[int]) -> bool:
    return all(position in (before + 1, *first_positions) for before, position in pairwise(positions))
