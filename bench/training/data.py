"""Batches of every step, which depend only on the cell and the step's number, not on the sharding.

A sample is a whole sequence. Step s uses the samples s * G to (s + 1) * G - 1, where G is the number of
sequences per step. Only this module decides which rank and micro-step gets which sample.

Shapes: B sequences of S tokens, padding included. S is the argument `length` of the methods of StepData:
`cell.padded_len` in training, less in a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bench.attention.documents import Documents
from bench.attention.packed import positions_in_documents
from bench.config import Cell
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import IGNORED_LABEL, Batch
from bench.training.packing import PackedText, random_ends
from bench.training.questions import EncodedQuestion, Encoder
from bench.training.tasks import TaskGenerator
from bench.training.text import read_documents
from bench.training.tokenizer import token_ids

SampleTokens = Callable[[int, int], Tensor]
"""Function (sample, length) that returns the first `length` token IDs of a sample, int64."""
SampleEnds = Callable[[int, int], tuple[int, ...]]
"""Function (sample, length) that returns the ends of the documents in the first `length` tokens of a sample,
in ascending order. The last end is always `length`, also if the text's document is longer."""


SampleFlags = Callable[[int, int], Tensor]
"""Function (sample, length) that returns a Boolean for each of the first `length` tokens of a sample."""


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Source of the tokens and the documents of a cell's samples."""

    tokens: SampleTokens
    ends: SampleEnds | None = None
    """Ends of documents; None if every sequence is one document."""
    counts: SampleFlags | None = None
    """Tokens that count as labels; None if all of them do."""


RANK_ORDERS: Mapping[str, Callable[[range], range]] = {
    "in_order": lambda sequences: sequences,
    "reversed": lambda sequences: sequences[::-1],
}
"""Order in which ranks and micro-steps receive the sequences of a step, by `data.rank_order`."""


class StepData:
    """Batches of every step of one cell."""

    def __init__(
        self, cell: Cell, source: SampleSource, device: torch.device, *, uncounted_tokens: int = 0
    ) -> None:
        """Create the data of a cell.

        The loss ignores the first, third, fifth, ... label of every sequence, `uncounted_tokens` in all. A
        check asks for this, because a wrong average over ranks only shows if ranks count unequal numbers of
        labels, as they then do in every layout.
        """
        self.cell = cell
        self.source = source
        self.device = device
        self.uncounted_tokens = uncounted_tokens

    def micro_batch(self, step: int, micro_step: int, data_rank: int, length: int) -> Batch:
        """Return the sequences [B, S] of a data-parallel rank and micro-step, on the device."""
        return self.host_micro_batch(step, micro_step, data_rank, length).to_device(self.device)

    def host_micro_batch(self, step: int, micro_step: int, data_rank: int, length: int) -> Batch:
        """Return the sequences [B, S] of a data-parallel rank and micro-step, in host memory."""
        return self._batch(self.samples(step, micro_step, data_rank), length)

    def samples(self, step: int, micro_step: int, data_rank: int) -> list[int]:
        """Return the numbers of the samples of a data-parallel rank and micro-step."""
        cell = self.cell
        sequences = RANK_ORDERS[cell.data.rank_order](range(cell.sequences_per_step))
        first = (micro_step * cell.dp_degree + data_rank) * cell.batch
        return [step * cell.sequences_per_step + i for i in sequences[first : first + cell.batch]]

    def whole_step(self, step: int, length: int) -> list[Batch]:
        """Return all sequences of a step as batches [1, S], not sharded."""
        per_step = self.cell.sequences_per_step
        samples = range(step * per_step, (step + 1) * per_step)
        return [self._batch([sample], length).to_device(self.device) for sample in samples]

    def documents(self, samples: Sequence[int], length: int) -> Documents | None:
        """Return the documents of whole sequences; None if every sequence is one document.

        The padding of a sequence is one more document.
        """
        ends_of, text_length = self.source.ends, self._text_length(length)
        if ends_of is None:
            return None
        padding_end = (length,) if length > text_length else ()
        return Documents(tuple((*ends_of(i, text_length), *padding_end) for i in samples))

    def _batch(self, samples: Sequence[int], length: int) -> Batch:
        """Return whole sequences [B, S] in host memory, with IGNORED_LABEL where the loss ignores a label."""
        text_length = self._text_length(length)
        tokens = torch.stack([self.source.tokens(i, text_length + 1) for i in samples])
        in_sequence = torch.arange(length).expand(len(samples), -1)
        documents = self.documents(samples, length)
        positions = in_sequence if documents is None else positions_in_documents(documents)
        ignored = (in_sequence < 2 * self.uncounted_tokens) & (in_sequence % 2 == 0)
        ignored |= positions < self.cell.data.prompt_tokens
        if documents is not None:
            ignored |= self._document_last_tokens(samples, length)
        if self.source.counts is not None:
            counts = torch.stack([self.source.counts(i, text_length + 1)[1:] for i in samples])
            ignored |= ~pad(counts, (0, length - text_length))
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        if padding := length - text_length:
            ids, labels = pad(ids, (0, padding)), pad(labels, (0, padding), value=IGNORED_LABEL)
        labels = labels.masked_fill(ignored, IGNORED_LABEL)
        return Batch(torch.tensor(samples), ids, labels, positions, documents)

    def _text_length(self, length: int) -> int:
        """Return how many of a sequence's `length` tokens come before the padding."""
        return min(length, self.cell.seq_len)

    def _document_last_tokens(self, samples: Sequence[int], length: int) -> Tensor:
        """Return a mask [B, S] that is True at the last token of each document.

        If the end of the sequence cuts a document, the token in front of the cut is not a last token. The
        token after the sequence shows whether it does.
        """
        ends_of = self.source.ends
        assert ends_of is not None
        is_last = torch.zeros(len(samples), length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            ends = ends_of(sample, self._text_length(length) + 1)[:-1]
            is_last[row, [end - 1 for end in ends]] = True
        return is_last


def open_data(cell: Cell, device: torch.device, *, uncounted_tokens: int = 0) -> StepData:
    """Return the data of a cell; raise ConfigError if its text cannot be read.

    See `StepData` for `uncounted_tokens`.
    """
    return StepData(cell, SOURCES[cell.data.name](cell), device, uncounted_tokens=uncounted_tokens)


def batch_digest(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
    """Return a sum over (position, token, label) that sharding does not change, an int64 scalar.

    If a rank gets a token twice, misses one or has a wrong position, the sum over all ranks differs from the
    digest of the whole step. The call does not wait for the device, so that every step can afford it.
    """
    return splitmix64((position_ids * 1_000_003 + input_ids) * 1_000_003 + labels).sum()


class InputDigest:
    """Digest of all inputs of a model since the last call of `take`."""

    def __init__(self) -> None:
        self._digests: list[Tensor] = []
        self.positions: Tensor | None = None
        """Positions [B, S] of the first forward pass since the last call of `take`."""

    def add(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> None:
        """Add the inputs of one forward pass."""
        if not self._digests:
            self.positions = position_ids
        self._digests.append(batch_digest(input_ids, labels, position_ids))

    def take(self) -> Tensor:
        """Return the digest, an int64 scalar, and reset it; 0 if no forward pass was added."""
        total = torch.stack(self._digests).sum() if self._digests else torch.tensor(0)
        self._digests.clear()
        return total


def count_valid(labels: Tensor) -> Tensor:
    """Return the number of labels that count in the loss, as an int64 scalar on their device."""
    return (labels != IGNORED_LABEL).sum()


def splitmix64(x: Tensor) -> Tensor:
    """Return the hash of each int64 number by the finaliser of splitmix64, with arithmetic right shifts."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _text_source(cell: Cell) -> SampleSource:
    """Return samples of a text, which starts again after its end.

    A sample starts where the previous one ends. If documents are packed, it starts with the next document.
    """
    with without_memory_limit():
        texts = read_documents(cell.data.path, cell.data.tokenizer)
        if not cell.data.packs:
            texts = _with_blank_lines(texts)
        documents = [_tokenise(text, cell.data.tokenizer, cell.model.vocab_size) for text in texts if text]
        corpus = _join_in_shared_memory(documents)
        lengths = [len(document) for document in documents if len(document)]
        packed = PackedText(lengths, cell.seed, cell.seq_len)

    def sample_start(sample: int) -> int:
        return packed.start(sample) if cell.data.packs else cell.seed + sample * cell.seq_len

    def sample_tokens(sample: int, length: int) -> Tensor:
        tokens = corpus[(sample_start(sample) + np.arange(length)) % len(corpus)].astype(np.int64)
        return torch.from_numpy(tokens % cell.model.vocab_size)

    return SampleSource(sample_tokens, packed.sample_ends if cell.data.packs else None)


def _synthetic_source(cell: Cell) -> SampleSource:
    def sample_tokens(sample: int, length: int) -> Tensor:
        hashed = splitmix64(torch.tensor(cell.seed * 1_000_003 + sample) * 1_000_003 + torch.arange(length))
        return hashed.remainder(cell.model.vocab_size)

    def sample_ends(sample: int, length: int) -> tuple[int, ...]:
        return random_ends(cell.seed, sample, cell.seq_len, length)

    return SampleSource(sample_tokens, sample_ends if cell.data.packs else None)


def _task_source(cell: Cell) -> SampleSource:
    """Return samples of generated questions, in which only the answers count as labels."""
    generator = TaskGenerator(Encoder(cell.data.tokenizer, cell.model.vocab_size), cell.seed)

    @lru_cache(maxsize=max(256, 2 * cell.sequences_per_step))
    def encode_sample(sample: int, length: int) -> EncodedQuestion:
        return generator.training_question(sample, length)

    def sample_tokens(sample: int, length: int) -> Tensor:
        ids = torch.from_numpy(encode_sample(sample, length).ids)
        return pad(ids, (0, length - len(ids)))

    def sample_counts(sample: int, length: int) -> Tensor:
        flags = torch.from_numpy(encode_sample(sample, length).is_answer)
        return pad(flags, (0, length - len(flags)))

    return SampleSource(sample_tokens, counts=sample_counts)


SOURCES: Mapping[str, Callable[[Cell], SampleSource]] = {
    "text": _text_source,
    "synthetic": _synthetic_source,
    "tasks": _task_source,
}


def _with_blank_lines(documents: Iterable[str]) -> Iterator[str]:
    """Yield documents that form one text with a blank line between them."""
    for number, document in enumerate(documents):
        yield f"\n\n{document}" if number else document


def _tokenise(text: str, tokenizer: str | None, vocab_size: int) -> NDArray[Any]:
    """Return token IDs, or UTF-8 bytes without a tokenizer. An array does not count as tensor memory."""
    if tokenizer is None:
        return np.frombuffer(text.encode(), dtype=np.uint8)
    return token_ids(text, tokenizer, vocab_size)


def _join_in_shared_memory(documents: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return all tokens in shared pages, which do not count in the limit on a rank's private memory."""
    size_bytes = sum(document.nbytes for document in documents)
    tokens = np.frombuffer(mmap(-1, size_bytes), dtype=documents[0].dtype)
    return np.concatenate(documents, out=tokens)
