"""Tokens of a step as a pure function of its number, whatever the sharding.

A sample is a whole sequence. Step s uses samples s * G .. (s + 1) * G - 1, where G is the number of
sequences per step; which rank and micro-step gets which of them is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.config import ConfigError, RunConfig
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import IGNORED_LABEL, Batch
from bench.training.text import read_text

SampleTokens = Callable[[int, int], Tensor]
"""(sample, length) -> that many token ids, int64: the first tokens of the sample."""


DEALS: Mapping[str, Callable[[range], range]] = {
    "in_order": lambda sequences: sequences,
    "reversed": lambda sequences: sequences[::-1],
}
"""In which order the sequences of a step are dealt out."""


class StepData:
    """The batches of every step of one cell."""

    def __init__(self, cell: RunConfig, sample_tokens: SampleTokens, device: torch.device) -> None:
        self.cell = cell
        self.sample_tokens = sample_tokens
        self.device = device

    def micro_batch(self, step: int, micro_step: int, data_rank: int, seq_len: int) -> Batch:
        """Whole sequences [batch, seq_len] of one data-parallel rank and micro-step."""
        cell = self.cell
        of_step = DEALS[cell.data.deal](range(cell.sequences_per_step))
        first = (micro_step * cell.dp_degree + data_rank) * cell.batch
        samples = [step * cell.sequences_per_step + i for i in of_step[first : first + cell.batch]]
        return self._whole(samples, seq_len)

    def whole_step(self, step: int, seq_len: int) -> list[Batch]:
        """Every sequence of a step, one per batch, without any sharding."""
        per_step = self.cell.sequences_per_step
        return [self._whole([i], seq_len) for i in range(step * per_step, (step + 1) * per_step)]

    def _whole(self, samples: Sequence[int], seq_len: int) -> Batch:
        tokens = torch.stack([self.sample_tokens(i, seq_len + 1) for i in samples]).to(self.device)
        positions = torch.arange(seq_len, device=self.device).expand(len(samples), -1)
        prompt = positions < self.cell.data.prompt_tokens
        labels = tokens[:, 1:].masked_fill(prompt, IGNORED_LABEL)
        return Batch(torch.tensor(samples, device=self.device), tokens[:, :-1], labels, positions)


def open_data(cell: RunConfig, device: torch.device) -> StepData:
    """The cell's data; raises ConfigError where the text cannot be read."""
    return StepData(cell, SOURCES[cell.data.name](cell), device)


def digest(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
    """A sum over (position, token, label) that no sharding changes: an int64 scalar on their device.

    Ranks that saw a token twice, missed one or took a wrong position do not add up to the sum of the
    whole step. Nothing waits for the device, so that every step can afford it.
    """
    return mixed((position_ids * 1_000_003 + input_ids) * 1_000_003 + labels).sum()


class FedTokens:
    """The digest of all that entered a model since it was last taken."""

    def __init__(self) -> None:
        self._digests: list[Tensor] = []

    def add(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> None:
        """Note what a forward pass is given."""
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


def _text_source(cell: RunConfig) -> SampleTokens:
    with without_memory_limit():
        corpus = _shared(_tokenise(read_text(cell.data), cell.data.tokenizer, cell.model.vocab_size))

    def sample_tokens(sample: int, length: int) -> Tensor:
        """Sample i starts where sample i - 1 ends; the text repeats when it is used up."""
        start = (cell.seed + sample * cell.seq_len) % len(corpus)
        tokens = corpus[(start + np.arange(length)) % len(corpus)].astype(np.int64)
        return torch.from_numpy(tokens % cell.model.vocab_size)

    return sample_tokens


def _synthetic_source(cell: RunConfig) -> SampleTokens:
    def sample_tokens(sample: int, length: int) -> Tensor:
        hashed = mixed(torch.tensor(cell.seed * 1_000_003 + sample) * 1_000_003 + torch.arange(length))
        return hashed.remainder(cell.model.vocab_size)

    return sample_tokens


SOURCES: Mapping[str, Callable[[RunConfig], SampleTokens]] = {
    "text": _text_source,
    "synthetic": _synthetic_source,
}


def _tokenise(text: str, tokenizer: str | None, vocab_size: int) -> NDArray[Any]:
    """The whole text's tokens. No tensor: a cell's memory is its model's, whatever text it reads."""
    if tokenizer is None:
        return np.frombuffer(text.encode(), dtype=np.uint8)
    from transformers import AutoTokenizer

    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    ids = np.array(encoder(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: gives ids up to {int(ids.max())}, but the model's vocabulary has"
            f" {vocab_size}; take the model's own tokenizer"
        )
    return ids


def _shared(tokens: NDArray[Any]) -> NDArray[Any]:
    """The same in shared pages, which a limit on a rank's own data does not count."""
    copy = np.frombuffer(mmap(-1, tokens.nbytes), dtype=tokens.dtype)
    copy[:] = tokens
    return copy
