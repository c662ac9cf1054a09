"""Tiles of packed documents: a query sees the keys of its document up to its own position."""

import pytest

from bench.attention.documents import Documents, document_tiles
from bench.attention.layouts import LAYOUTS
from bench.training.packing import random_documents

TOKENS = (8, 24, 96)
CASES = [
    (layout, degree, tokens)
    for layout in LAYOUTS
    for degree in (1, 2, 4)
    for tokens in TOKENS
    if tokens % LAYOUTS[layout].length_multiple(degree) == 0
]


def some_documents(tokens):
    """Random documents, one that fills the sequence, and documents of single tokens."""
    drawn = [random_documents(2, tokens, seed) for seed in range(8)]
    return [*drawn, Documents(((tokens,), tuple(range(1, tokens + 1))))]


def positions(layout, tokens, degree, rank):
    return [p for piece in LAYOUTS[layout].slices(tokens, degree, rank) for p in range(tokens)[piece]]


def visible(documents, sequence, queries):
    """(query, key) pairs by the definition."""
    return {
        (q, k)
        for document in documents.positions_of(sequence)
        for q in document
        if q in queries
        for k in range(document.start, q + 1)
    }


def computed(tile, queries, keys):
    """(query, key) positions of one tile of two shards, given the positions of the shards."""
    rows, columns = queries[tile.queries], keys[tile.keys]
    assert rows
    assert columns
    assert not tile.causal or len(rows) == len(columns)
    return [
        (query, key)
        for i, query in enumerate(rows)
        for j, key in enumerate(columns)
        if j <= i or not tile.causal
    ]


@pytest.mark.parametrize(("layout", "degree", "tokens"), CASES)
def test_document_tiles_cover_each_visible_pair_once(layout, degree, tokens):
    shards = [positions(layout, tokens, degree, rank) for rank in range(degree)]
    for documents in some_documents(tokens):
        for rank, queries in enumerate(shards):
            pairs = [[], []]
            for source, keys in enumerate(shards):
                for tile in document_tiles(documents, LAYOUTS[layout], degree, rank, source):
                    pairs[tile.sequence] += computed(tile, queries, keys)
            expected = [visible(documents, sequence, {*queries}) for sequence in (0, 1)]
            assert [{*sequence_pairs} for sequence_pairs in pairs] == expected
            assert [*map(len, pairs)] == [*map(len, expected)]
            pieces = LAYOUTS[layout].slices(tokens, degree, rank)
            assert documents.causal_pairs(pieces) == sum(map(len, expected))
