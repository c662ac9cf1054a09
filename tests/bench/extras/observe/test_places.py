"""Order of a sequence's tokens, from the positions of its shards."""

import pytest

from bench.extras.observe.places import document_starts, find_places

PLACES = {
    "contiguous": ([[0, 1, 2, 3], [4, 5, 6, 7]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "an order that no layout has": ([[7, 0, 5, 2], [4, 1, 6, 3]], [7, 0, 5, 2, 4, 1, 6, 3]),
    "skipped numbers": ([[0, 1, 90, 91], [92, 93, 500, 501]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "documents": ([[0, 1, 2, 0], [1, 2, 3, 4]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "documents in zigzag shards": ([[0, 1, 3, 4], [2, 0, 1, 2]], [0, 1, 6, 7, 2, 3, 4, 5]),
    "documents in striped shards": ([[0, 2, 1, 3], [1, 0, 2, 4]], [0, 2, 4, 6, 1, 3, 5, 7]),
    "padding of zeros": ([[0, 1, 2, 3], [4, 5, 0, 0]], [0, 1, 2, 3, 4, 5, 6, 7]),
    "padding in front": ([[1, 1, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [*range(12)]),
    "documents that two layouts cut differently": ([[0, 1], [0, 0]], None),
    "a position twice": ([[0, 1, 2, 3], [4, 5, 6, 6]], None),
    "positions below zero": ([[-2, -1, 0, 1], [2, 3, 4, 5]], None),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_follow_from_positions(case):
    shards, places = PLACES[case]
    assert find_places([[row] for row in shards]) == places


def test_places_must_fit_every_sequence_of_a_batch():
    zigzag, packed = [[0, 1, 6, 7], [2, 3, 4, 5]], [[0, 1, 3, 4], [2, 0, 1, 2]]
    places = find_places([*zip(zigzag, packed, strict=True)])
    assert places == [0, 1, 6, 7, 2, 3, 4, 5]
    assert find_places([*zip(zigzag, [[0, 1, 2, 3], [4, 5, 6, 7]], strict=True)]) is None


@pytest.mark.parametrize(
    ("positions", "starts"),
    [([0, 1, 2, 0, 1, 0], [0, 0, 0, 3, 3, 5]), ([0, 0, 1], [0, 1, 1]), ([0, 1, 7, 8], [0, 0, 0, 0])],
)
def test_documents_start_where_positions_restart(positions, starts):
    assert document_starts(positions) == starts
