"""Tokens of a step as a pure function of its number, whatever the sharding.

A sample is a whole sequence. Step s uses samples s * G .. (s + 1) * G - 1, where G is the number of
sequences per step; which rank and micro-step gets which of them is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bench.attention.documents import Documents
from bench.attention.packed import restarted
from bench.config import Cell
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import IGNORED_LABEL, Batch
from bench.training.packing import PackedText, drawn_ends
from bench.training.text import read_documents, read_text, token_ids

SampleTokens = Callable[[int, int], Tensor]
"""(sample, length) -> that many token ids, int64: the first tokens of the sample."""
SampleEnds = Callable[[int, int], tuple[int, ...]]
"""(sample, length) -> where the documents among its first tokens end, ascending, the length last."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a cell's samples are made of."""

    tokens: SampleTokens
    ends: SampleEnds | None = None
    """None where each sequence is one document."""


DEALS: Mapping[str, Callable[[range], range]] = {
    "in_order": lambda sequences: sequences,
    "reversed": lambda sequences: sequences[::-1],
}
"""In which order the sequences of a step are dealt out."""


class StepData:
    """The batches of every step of one cell."""

    def __init__(
        self, cell: Cell, source: Source, device: torch.device, *, uncounted_tokens: int = 0
    ) -> None:
        """`uncounted_tokens` labels do not count, whatever the documents: every second one from the start.

        So ranks hold unequal numbers of labels that count in contiguous, zigzag and striped layouts.
        """
        self.cell = cell
        self.source = source
        self.device = device
        self.uncounted_tokens = uncounted_tokens

    def micro_batch(self, step: int, micro_step: int, data_rank: int, seq_len: int) -> Batch:
        """Whole sequences [batch, seq_len] of one data-parallel rank and micro-step."""
        return self.rows(step, micro_step, data_rank, seq_len).to(self.device)

    def rows(self, step: int, micro_step: int, data_rank: int, seq_len: int) -> Batch:
        """Whole sequences [batch, seq_len] of a data-parallel rank and micro-step, in host memory."""
        return self._whole(self.samples(step, micro_step, data_rank), seq_len)

    def samples(self, step: int, micro_step: int, data_rank: int) -> list[int]:
        """The numbers of these sequences."""
        cell = self.cell
        of_step = DEALS[cell.data.rank_order](range(cell.sequences_per_step))
        first = (micro_step * cell.dp_degree + data_rank) * cell.batch
        return [step * cell.sequences_per_step + i for i in of_step[first : first + cell.batch]]

    def whole_step(self, step: int, seq_len: int) -> list[Batch]:
        """Every sequence of a step, one per batch, without any sharding."""
        per_step = self.cell.sequences_per_step
        samples = range(step * per_step, (step + 1) * per_step)
        return [self._whole([sample], seq_len).to(self.device) for sample in samples]

    def documents(self, samples: Sequence[int], seq_len: int) -> Documents | None:
        """Where those of whole sequences end; None where each is one. Padding is a document of its own."""
        ends_of, (own, padding) = self.source.ends, self._lengths(seq_len)
        if ends_of is None:
            return None
        padded = (seq_len,) if padding else ()
        return Documents(tuple((*ends_of(i, own), *padded) for i in samples))

    def _whole(self, samples: Sequence[int], seq_len: int) -> Batch:
        own, padding = self._lengths(seq_len)
        tokens = torch.stack([self.source.tokens(i, own + 1) for i in samples])
        in_sequence = torch.arange(seq_len).expand(len(samples), -1)
        documents = self.documents(samples, seq_len)
        positions = in_sequence if documents is None else restarted(documents)
        unchecked = (in_sequence < 2 * self.uncounted_tokens) & (in_sequence % 2 == 0)
        uncounted = unchecked | (positions < self.cell.data.prompt_tokens)
        if documents is not None:
            uncounted |= self._last_of_documents(samples, seq_len)
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        if padding:
            ids, labels = pad(ids, (0, padding)), pad(labels, (0, padding), value=IGNORED_LABEL)
        labels = labels.masked_fill(uncounted, IGNORED_LABEL)
        return Batch(torch.tensor(samples), ids, labels, positions, documents)

    def _lengths(self, seq_len: int) -> tuple[int, int]:
        """A sequence's own tokens, and those after them that only fill it."""
        own = min(seq_len, self.cell.seq_len)
        return own, seq_len - own

    def _last_of_documents(self, samples: Sequence[int], seq_len: int) -> Tensor:
        """Whose next token is another document's, [B, T]; a document that the sequence cuts goes on."""
        ends_of, (own, _) = self.source.ends, self._lengths(seq_len)
        assert ends_of is not None
        is_last = torch.zeros(len(samples), seq_len, dtype=torch.bool)
        for row, sample in enumerate(samples):
            is_last[row, [end - 1 for end in ends_of(sample, own + 1)[:-1]]] = True
        return is_last


def open_data(cell: Cell, device: torch.device, *, uncounted_tokens: int = 0) -> StepData:
    """The cell's data; raises ConfigError where the text cannot be read."""
    return StepData(cell, SOURCES[cell.data.name](cell), device, uncounted_tokens=uncounted_tokens)


def digest(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
    """A sum over (position, token, label) that no sharding changes: an int64 scalar on their device.

    Ranks that saw a token twice, missed one or took a wrong position do not add up to the sum of the
    whole step. Nothing waits for the device, so that every step can afford it.
    """
    return mixed((position_ids * 1_000_003 + input_ids) * 1_000_003 + labels).sum()


class InputDigest:
    """The digest of all that entered a model since it was last taken."""

    def __init__(self) -> None:
        self._digests: list[Tensor] = []
        self.positions: Tensor | None = None
        """[B, S] of the first forward pass since then."""

    def add(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> None:
        """Note what a forward pass is given."""
        if not self._digests:
            self.positions = position_ids
        self._digests.append(digest(input_ids, labels, position_ids))

    def take(self) -> Tensor:
        """What was noted, as an int64 scalar, and begin anew; 0 where the model was not called."""
        total = torch.stack(self._digests).sum() if self._digests else torch.tensor(0)
        self._digests.clear()
        return total


def count_valid(labels: Tensor) -> Tensor:
    """How many labels take part in the loss, as an int64 scalar on their device."""
    return (labels != IGNORED_LABEL).sum()


def mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 with arithmetic shifts; int64 wraps round."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _text_source(cell: Cell) -> Source:
    """Sample i starts where sample i - 1 ends, or with the next document; the text repeats when used up."""
    with without_memory_limit():
        texts = read_documents(cell.data) if cell.data.packs else [read_text(cell.data)]
        documents = [_tokenise(text, cell.data.tokenizer, cell.model.vocab_size) for text in texts if text]
        corpus = _shared(np.concatenate(documents))
        packed = PackedText([len(each) for each in documents if len(each)], cell.seed, cell.seq_len)

    def start_of(sample: int) -> int:
        return packed.start(sample) if cell.data.packs else cell.seed + sample * cell.seq_len

    def sample_tokens(sample: int, length: int) -> Tensor:
        tokens = corpus[(start_of(sample) + np.arange(length)) % len(corpus)].astype(np.int64)
        return torch.from_numpy(tokens % cell.model.vocab_size)

    return Source(sample_tokens, packed.sample_ends if cell.data.packs else None)


def _synthetic_source(cell: Cell) -> Source:
    def sample_tokens(sample: int, length: int) -> Tensor:
        hashed = mixed(torch.tensor(cell.seed * 1_000_003 + sample) * 1_000_003 + torch.arange(length))
        return hashed.remainder(cell.model.vocab_size)

    def sample_ends(sample: int, length: int) -> tuple[int, ...]:
        return drawn_ends(cell.seed, sample, cell.seq_len, length)

    return Source(sample_tokens, sample_ends if cell.data.packs else None)


SOURCES: Mapping[str, Callable[[Cell], Source]] = {
    "text": _text_source,
    "synthetic": _synthetic_source,
}


def _tokenise(text: str, tokenizer: str | None, vocab_size: int) -> NDArray[Any]:
    """The whole text's tokens. No tensor: a cell's memory is its model's, whatever text it reads."""
    if tokenizer is None:
        return np.frombuffer(text.encode(), dtype=np.uint8)
    return token_ids(text, tokenizer, vocab_size)


def _shared(tokens: NDArray[Any]) -> NDArray[Any]:
    """A copy in shared pages, which a limit on a rank's own data does not count."""
    copy = np.frombuffer(mmap(-1, tokens.nbytes), dtype=tokens.dtype)
    copy[:] = tokens
    return copy
