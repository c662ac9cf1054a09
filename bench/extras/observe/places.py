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
    each document, if all other such layouts have the same documents. `shards` is [ranks][sequences][tokens].
    """
    rows = [[*chain(*parts)] for parts in zip(*shards, strict=True)]
    if min(map(min, rows)) < 0:
        return None
    if all(len({*row}) == len(row) for row in rows):
        orders = [sorted(range(len(row)), key=row.__getitem__) for row in rows]
        return order(range(len(rows[0])), orders[0]) if all(item == orders[0] for item in orders) else None
    for first_positions in ((0,), (0, 1)):  # transformers gives padding in front of a text position 1
        fitting = []
        for _, parts in layout_shards(len(rows[0]), len(shards)):
            places = [*chain(*parts)]
            steps = chain(*(pairwise(order(row, places)) for row in rows))
            if all(position in (before + 1, *first_positions) for before, position in steps):
                fitting.append(places)
        if fitting:
            documents = [[_first_tokens(row, places) for row in rows] for places in fitting]
            return fitting[0] if all(item == documents[0] for item in documents) else None
    return None


def _first_tokens(row: Row, places: Sequence[int]) -> list[int]:
    """Return, for every token, the token with which its document starts, both in rank order."""
    token_at, starts = order(range(len(row)), places), document_starts(order(row, places))
    return [token_at[starts[place]] for place in places]


def order(values: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the values in the order of their places."""
    return [value for _, value in sorted(zip(places, values, strict=True))]


def document_starts(positions: Sequence[int]) -> list[int]:
    """Return, for every token of a row in order, the place where its document starts.

    Positions that only grow are one document, also where they skip numbers.
    """
    starts = [0]
    for place, (before, position) in enumerate(pairwise(positions), 1):
        starts.append(starts[-1] if position > before else place)
    return starts


def layout_shards(tokens: int, ranks: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the name of every built-in layout that divides a row, and the places of each rank's tokens."""
    for layout in LAYOUTS.values():
        if tokens % layout.length_multiple(ranks) == 0:
            shards = (layout.slices(tokens, ranks, rank) for rank in range(ranks))
            yield layout.name, [[*chain(*(range(tokens)[piece] for piece in shard))] for shard in shards]
