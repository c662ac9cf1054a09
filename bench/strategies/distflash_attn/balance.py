"""Who computes what: ranks that have no earlier keys left compute for later ones (arXiv:2310.03294, 3.2).

Shards are contiguous, so that rank r has r whole blocks of causal attention and half a one, its own. After
its own it meets two others in each round, each time one further on round the ring. Of two ranks the later one
needs the earlier one's keys. Where the ring takes these on to it, it computes; where it takes the later one's
queries on to the earlier one, that one does, and sends back what it found. P/2 rounds are enough.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Lent(Enum):
    """What a rank hands to another to compute with."""

    KEYS = "keys"
    """Keys and values, for the other's own queries."""
    QUERIES = "queries"
    """For the other's own keys: what comes of it is the lender's."""


class Round(NamedTuple):
    """What a rank does with one rank on and one as far back, round the ring."""

    following: int
    """The rank that it lends to, and that gives back what it found."""
    previous: int
    """The rank that lends to it."""
    gives: Lent | None
    takes: Lent | None
    """None in the last round of an even number of ranks, where half of them have nothing to do."""


def rounds(rank: int, ranks: int, *, causal: bool) -> list[Round]:
    """A rank's rounds after that of its own block; all ranks have as many."""
    last = ranks // 2 if causal else ranks - 1
    return [
        Round(
            following=(rank + distance) % ranks,
            previous=(rank - distance) % ranks,
            gives=_lent(rank, distance, ranks, causal=causal),
            takes=_lent((rank - distance) % ranks, distance, ranks, causal=causal),
        )
        for distance in range(1, last + 1)
    ]


def _lent(rank: int, distance: int, ranks: int, *, causal: bool) -> Lent | None:
    """Without a mask every rank needs all keys, and nobody's help."""
    if not causal or rank + distance < ranks:
        return Lent.KEYS
    is_done_by_other = 2 * distance == ranks  # the pair meets twice, and the later rank computes
    return None if is_done_by_other else Lent.QUERIES
