"""Order of a sequence's tokens, from the positions of its shards."""

import pytest

from bench.extras.observe.places import ROW_FACTOR, document_starts, find_places, order

IMAGE = [(1, 1, 1), (2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3), (4, 4, 4)]
"""Positions of a token, an image of four patches, and a token, in rows of time, height and width."""
CODES = [(t * ROW_FACTOR + h) * ROW_FACTOR + w for t, h, w in IMAGE]
PLACES = {
    "contiguous": ([[0, 1, 2, 3], [4, 5, 6, 7]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "an order that no layout has": ([[7, 0, 5, 2], [4, 1, 6, 3]], [7, 0, 5, 2, 4, 1, 6, 3]),
    "documents": ([[0, 1, 2, 0], [1, 2, 3, 4]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "documents in zigzag shards": ([[0, 1, 3, 4], [2, 0, 1, 2]], [0, 1, 6, 7, 2, 3, 4, 5]),
    "documents in striped shards": ([[0, 2, 1, 3], [1, 0, 2, 4]], [0, 2, 4, 6, 1, 3, 5, 7]),
    "padding of zeros": ([[0, 1, 2, 3], [4, 5, 0, 0]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "padding in front": ([[1, 1, 0, 1], [2, 3, 4, 5]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "a position twice": ([[0, 1, 2, 3], [4, 5, 6, 6]], None),
    "a position is missing": ([[0, 1, 2, 3], [5, 6, 7, 8]], None),
    "an image": ([CODES[:3], CODES[3:]], [0, 1, 2, 3, 4, 5]),
    "an image on one rank": ([CODES[:5], [4, 5, 6, 7, 8]], [*range(10)]),
    "an image twice": ([CODES[:3], CODES[:3]], None),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_follow_from_positions(case):
    shards, places = PLACES[case]
    assert find_places([[row] for row in shards]) == places


def test_places_must_fit_every_sequence_of_a_batch():
    zigzag, packed = [[0, 1, 6, 7], [2, 3, 4, 5]], [[0, 1, 3, 4], [2, 0, 1, 2]]
    places = find_places([*zip(zigzag, packed, strict=True)])
    assert places == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("positions", "starts"),
    [([0, 1, 2, 0, 1, 0], [0, 0, 0, 3, 3, 5]), ([0, 0, 1], [0, 1, 1]), (CODES, [0] * 6)],
)
def test_documents_start_where_positions_restart(positions, starts):
    assert document_starts(order(positions, range(len(positions)))) == starts
