"""Whole documents laid end to end in a sequence: which of them, and where they end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import numpy as np

from bench.attention.documents import Documents

ONE_TOKEN_EVERY = 4
"""One drawn document in so many, from the second, is a single token: the shortest a text can have."""


class PackedText:
    """Which part of a text each sample is: whole documents in their order, the last one cut.

    What is cut off is in no sample; the text repeats when it is used up.
    """

    def __init__(self, lengths: Sequence[int], first: int, seq_len: int) -> None:
        """The text's documents have `lengths` tokens; sample 0 starts with the document `first`."""
        self.ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self.seq_len = seq_len
        at = first % len(lengths)
        self.starts = [int(self.ends[at]) - lengths[at]]

    @property
    def tokens(self) -> int:
        """Of the whole text."""
        return int(self.ends[-1])

    def start(self, sample: int) -> int:
        """The text's token that a sample starts with, counted on where the text repeats."""
        while len(self.starts) <= sample:
            self.starts.append(self._boundary_from(self.starts[-1] + self.seq_len))
        return self.starts[sample]

    def sample_ends(self, sample: int, length: int) -> tuple[int, ...]:
        """Where the documents among the first `length` tokens of a sample end, the last one cut."""
        start, inside = self.start(sample), list[int]()
        for repeat in range(start // self.tokens, (start + length) // self.tokens + 1):
            ends = self.ends + (repeat * self.tokens - start)
            inside += ends[(ends > 0) & (ends < length)].tolist()
        return (*inside, length)

    def _boundary_from(self, token: int) -> int:
        """The first token from here on that begins a document."""
        repeat, within = divmod(token, self.tokens)
        if within == 0:
            return token
        return repeat * self.tokens + int(self.ends[np.searchsorted(self.ends, within)])


def drawn_ends(seed: int, sample: int, seq_len: int, length: int) -> tuple[int, ...]:
    """Where drawn documents among the first `length` tokens of a sample end.

    The logarithms of their lengths are spread evenly up to that of half of `seq_len`.
    """
    draw, ends, end = random.Random(seed * 1_000_003 + sample), [], 0
    for number in count():
        drawn = int(max(1, seq_len // 2) ** draw.random())
        end += 1 if number % ONE_TOKEN_EVERY == 1 else drawn
        if end >= length:
            break
        ends.append(end)
    return (*ends, length)


def drawn_documents(sequences: int, tokens: int, seed: int = 0) -> Documents:
    """The documents of a batch for a check: other boundaries in every sequence."""
    return Documents(tuple(drawn_ends(seed, sequence, tokens, tokens) for sequence in range(sequences)))
