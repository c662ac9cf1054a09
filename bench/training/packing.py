"""Packing of documents into sequences: which documents a sequence holds, and where they end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import numpy as np

from bench.attention.documents import Documents

ONE_TOKEN_EVERY = 4
"""Distance between random documents with a single token, the shortest possible length. The second document of
a sample is the first of these."""


class PackedText:
    """Positions of samples in a text.

    A sample of `seq_len` tokens begins with a document and holds documents in their order. The last one is
    cut to fit; no sample has its remaining tokens. The text starts again after its end.
    """

    def __init__(self, lengths: Sequence[int], first_document: int, seq_len: int) -> None:
        """Pack documents of `lengths` tokens; sample 0 starts with document number `first_document`."""
        self.ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self.seq_len = seq_len
        document = first_document % len(lengths)
        self.starts = [int(self.ends[document]) - lengths[document]]

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole text."""
        return int(self.ends[-1])

    def start(self, sample: int) -> int:
        """Return the position of a sample's first token, in the text repeated without end."""
        while len(self.starts) <= sample:
            self.starts.append(self._next_document_start(self.starts[-1] + self.seq_len))
        return self.starts[sample]

    def sample_ends(self, sample: int, length: int) -> tuple[int, ...]:
        """Return the ends of the documents in the first `length` tokens of a sample, `length` last."""
        start, inside = self.start(sample), list[int]()
        for repeat in range(start // self.tokens, (start + length) // self.tokens + 1):
            ends = self.ends + (repeat * self.tokens - start)
            inside += ends[(ends > 0) & (ends < length)].tolist()
        return (*inside, length)

    def _next_document_start(self, token: int) -> int:
        """Return the first position, from `token` on, at which a document starts."""
        repeat, within = divmod(token, self.tokens)
        if within == 0:
            return token
        return repeat * self.tokens + int(self.ends[np.searchsorted(self.ends, within)])


def random_ends(seed: int, sample: int, seq_len: int, length: int) -> tuple[int, ...]:
    """Return the ends of random documents in the first `length` tokens of a sample, `length` last.

    Lengths are uniform on a log scale, from 1 to half of `seq_len`. A smaller `length` cuts the documents of
    a sample and does not change them.
    """
    generator, ends, end = random.Random(seed * 1_000_003 + sample), [], 0
    for number in count():
        tokens = int(max(1, seq_len // 2) ** generator.random())
        end += 1 if number % ONE_TOKEN_EVERY == 1 else tokens
        if end >= length:
            break
        ends.append(end)
    return (*ends, length)


def random_documents(sequences: int, tokens: int, seed: int = 0) -> Documents:
    """Return random documents of a batch; every sequence has its own boundaries."""
    return Documents(tuple(random_ends(seed, sequence, tokens, tokens) for sequence in range(sequences)))
