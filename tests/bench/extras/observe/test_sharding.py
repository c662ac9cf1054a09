"""Order of a sequence's tokens from the positions of its shards, and groups of ranks from their reports."""

from dataclasses import replace

import pytest

from bench.attention.layouts import LAYOUTS
from bench.extras.observe.objective import RankObjective
from bench.extras.observe.places import document_starts, find_places
from bench.extras.observe.sharding import (
    equal_tokens_line,
    find_layout,
    group_mistake,
    places_of,
    sharding_mistake,
    token_holders,
)
from bench.extras.observe.tokens import LoopReport, ShardTokens
from bench.measure.facts import RankReport

NO_ORDER = "do not determine the order"
SHARDS = {
    "contiguous": ([[0, 1, 2, 3], [4, 5, 6, 7]], [0, 1, 2, 3, 4, 5, 6, 7], None),
    "zigzag": ([[0, 1, 6, 7], [2, 3, 4, 5]], [0, 1, 6, 7, 2, 3, 4, 5], None),
    "striped": ([[0, 2, 4, 6], [1, 3, 5, 7]], [0, 2, 4, 6, 1, 3, 5, 7], None),
    "no layout, and skipped numbers": ([[70, 0, 5, 2], [4, 1, 6, 3]], [7, 0, 5, 2, 4, 1, 6, 3], None),
    "documents": ([[0, 1, 2, 3], [4, 0, 1, 2]], [0, 1, 2, 3, 4, 5, 6, 7], None),
    "documents in striped shards": ([[0, 2, 1, 3], [1, 0, 2, 4]], [0, 2, 4, 6, 1, 3, 5, 7], None),
    "padding of zeros": ([[0, 1, 2, 3], [4, 5, 0, 0]], [0, 1, 2, 3, 4, 5, 6, 7], None),
    "padding in front": ([[1, 1, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [*range(12)], None),
    "documents that two layouts cut differently": ([[0, 1], [0, 0]], NO_ORDER, None),
    "a position on two ranks": ([[0, 1, 2], [2, 3, 4]], NO_ORDER, "ranks 0 and 1 both hold position 2;"),
    "a position twice, which may be padding": ([[0, 1, 2], [3, 4, 4]], NO_ORDER, None),
    "positions below zero": ([[-1, 0], [1, 2]], "below 0", None),
}
"""Positions of the ranks, places of their tokens or why they are unknown, and the mistake."""


def shard_tokens(group_rank, positions, group=(0, 1)):
    return ShardTokens(
        group=group, group_rank=group_rank, batch=1, length=len(positions), micro_steps=1,
        digest=str(group_rank), positions=[positions], positions_reason=None,
    )  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_places_and_layout_follow_from_positions(case):
    rows, expected, mistake = SHARDS[case]
    shards = [shard_tokens(rank, row) for rank, row in enumerate(rows)]
    places, wrong = places_of(shards), sharding_mistake(shards)
    assert expected in places if isinstance(expected, str) else expected == places
    assert mistake in wrong if mistake else wrong is None
    assert {*LAYOUTS} <= {*SHARDS}
    if case in LAYOUTS:
        assert find_layout(shards[1:]) == find_layout(shards) == case


def test_places_must_fit_every_sequence_of_a_batch():
    zigzag, packed = [[0, 1, 6, 7], [2, 3, 4, 5]], [[0, 1, 3, 4], [2, 0, 1, 2]]
    assert find_places([*zip(zigzag, packed, strict=True)]) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert find_places([*zip(zigzag, [[0, 1, 2, 3], [4, 5, 6, 7]], strict=True)]) is None
    assert find_places([[[-1, 0]], [[1, 2]]]) is None


def test_documents_start_where_positions_restart():
    assert document_starts([0, 0, 1, 7, 8, 0, 1]) == [0, 1, 1, 1, 1, 5, 5]


def loop_report(rank, group, peers=frozenset()):
    tokens = shard_tokens(group.index(rank), [0, 1], group)
    return LoopReport(RankReport({}, {}, {}, None), tokens, [f"of {rank}"], peers, RankObjective())


PAIRS, CHAIN = [{0, 1}, {0, 1}, {2, 3}, {2, 3}], [{0, 1}, {1, 2}, {2, 3}, {3}]
GROUPS = {
    "Ulysses in one direction, a ring in the other": (4, [{0, 1, 2}, {0, 1, 3}, {0, 2, 3}, {1, 2, 3}], None),
    "collectives outside of the attention function": (4, [set()] * 4, None),
    "no group": (1, PAIRS, "among ranks 0, 1, but bench.observe was given no sequence group"),
    "a large group": (4, PAIRS, "0, 1, but bench.observe was given the sequence group 0, 1, 2, 3"),
    "a chain": (2, CHAIN, "0, 1, 2, 3, but bench.observe was given the sequence group 0, 1,"),
}
"""Size of the sequence groups, peers of each rank's attention, and the mistake."""


@pytest.mark.parametrize("case", GROUPS)
def test_sequence_group_is_that_of_attention(case):
    size, peers, mistake = GROUPS[case]
    groups = [range(rank - rank % size, rank - rank % size + size) for rank in range(4)]
    wrong = group_mistake([loop_report(rank, [*groups[rank]], peers[rank]) for rank in range(4)])
    assert mistake in wrong if mistake else wrong is None


def test_equal_tokens_of_ranks_count_once():
    reports = [loop_report(rank, [rank - rank % 2, rank - rank % 2 + 1]) for rank in range(6)]
    assert (equal_tokens_line(reports), token_holders(reports)) == (None, [[0, 1], [2, 3], [4, 5]])
    reports = [
        replace(report, untimed_steps=digest) for report, digest in zip(reports, "abcdab", strict=True)
    ]
    assert token_holders(reports) == [[0, 1, 4, 5], [2, 3]]
    assert equal_tokens_line(reports).startswith("ranks 0, 1, 4, 5 held the same tokens")
