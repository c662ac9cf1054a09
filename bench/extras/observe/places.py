"""Order of the tokens that several ranks hold, derived from their positions, and the documents among them.

A token's place is its index in the whole row, which all ranks' shards make up. Its position is the number
that the model was given for it. Both differ where positions restart, as in packed documents and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from bench.attention.layouts import LAYOUTS

Row = Sequence[int]
"""Positions of one sequence on one rank."""


def find_places(shards: Sequence[Sequence[Row]]) -> list[int] | None:
    """Return the places of all ranks' tokens, in rank order; None if the positions do not determine them.

    Tokens with different positions are in the order of these, which may skip numbers. Positions that restart
    are documents. The places are then those of the first built-in layout in which positions count up within
    each document, if all other such layouts have the same documents.

    Args:
        shards: Positions of every sequence on every rank, [ranks][sequences][tokens].
    """
    rows = [[position for row in parts for position in row] for parts in zip(*shards, strict=True)]
    count = len(rows[0])
    if min(map(min, rows)) < 0:
        return None
    if all(len({*row}) == count for row in rows):
        all_places = [_ranks_of(row) for row in rows]
        return all_places[0] if all(places == all_places[0] for places in all_places) else None
    for first_positions in ((0,), (0, 1)):  # transformers gives padding in front of a text position 1
        layouts = [[*chain(*parts)] for _, parts in layout_shards(count, len(shards))]
        fitting = [
            places
            for places in layouts
            if all(_restarts_only_at(first_positions, order(row, places)) for row in rows)
        ]
        if fitting:
            documents = [[_first_tokens(row, places) for row in rows] for places in fitting]
            return fitting[0] if all(found == documents[0] for found in documents) else None
    return None


def _first_tokens(row: Row, places: Sequence[int]) -> list[int]:
    """Return, for every token, the token with which its document starts, both in rank order."""
    token_at, starts = order(range(len(row)), places), document_starts(order(row, places))
    return [token_at[starts[place]] for place in places]


def order(values: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the values in the order of their places."""
    ordered = [0] * len(places)
    for value, place in zip(values, places, strict=True):
        ordered[place] = value
    return ordered


def document_starts(positions: Sequence[int]) -> list[int]:
    """Return, for every token of a row in order, the place where its document starts.

    Positions that only grow are one document, also where they skip numbers.
    """
    starts, start = [0], 0
    for place, (before, position) in enumerate(pairwise(positions), 1):
        start = start if position > before else place
        starts.append(start)
    return starts


def layout_shards(tokens: int, ranks: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the name of every built-in layout that divides a row, and the places of each rank's tokens."""
    for layout in LAYOUTS.values():
        if tokens % layout.length_multiple(ranks) == 0:
            shards = (layout.slices(tokens, ranks, rank) for rank in range(ranks))
            places = [[place for piece in shard for place in range(tokens)[piece]] for shard in shards]
            yield layout.name, places


def _ranks_of(values: Sequence[int]) -> list[int]:
    place_of = {value: place for place, value in enumerate(sorted(values))}
    return [place_of[value] for value in values]


def _restarts_only_at(first_positions: Sequence[int], positions: Sequence[int]) -> bool:
    return all(position in (before + 1, *first_positions) for before, position in pairwise(positions))
