"""How evenly strategies share out blocks, and that DistFlashAttn's rounds compute each of them once."""

import itertools

import pytest

from bench.strategies.distflash_attn.balance import Lent, rounds
from tests.sleeping_blocks import units_of

LAYOUTS = {"distflash_attn": "contiguous", "ring": "zigzag"}
UNITS = {"distflash_attn": (2.5, 2.9), "ring": (2, 2.4)}
"""What blocks alone take on four ranks, and the most that all may: less than half a block more, the least
that a schedule can waste. Of a contiguous ring they take P - 1/2."""


def test_blocks_that_sleep_take_half_the_ranks_and_in_distflash_half_a_block_more(launcher, tmp_path):
    found = units_of(launcher, tmp_path, LAYOUTS, 4)
    for strategy, (least, most) in UNITS.items():
        assert all(least <= units <= most for units in found[strategy]), found


def blocks_of(rank, ranks, *, causal):
    """(Whose queries, whose keys) of each block that a rank computes beside its own."""
    for each in rounds(rank, ranks, causal=causal):
        if each.takes is not None:
            yield (rank, each.previous) if each.takes is Lent.KEYS else (each.previous, rank)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_block_below_the_diagonal_is_computed_once_and_evenly(ranks, causal):
    by_rank = [[*blocks_of(rank, ranks, causal=causal)] for rank in range(ranks)]
    pairs = itertools.permutations(range(ranks), 2)
    assert sorted(itertools.chain(*by_rank)) == sorted((q, k) for q, k in pairs if k < q or not causal)
    counts = {len(blocks) for blocks in by_rank}
    assert counts == ({ranks // 2, (ranks - 1) // 2} if causal else {ranks - 1})
