"""Sums of token losses by position, which show faults that the mean over a whole sequence hides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.strategies.strategy import IGNORED_LABEL


class PositionLosses:
    """Recorder of token losses by position: a model adds to it in every forward pass while it is active."""

    def __init__(self) -> None:
        self.is_recording = False
        self.sums: Tensor | None = None
        """Sums of losses in row 0 and numbers of valid labels in row 1: a column for each part of a sequence,
        then one for the boundary positions. [2, parts + 1] in float64; None before the first forward pass."""

    @contextmanager
    def recording(self, tokens: int, *, parts: int, boundaries: int) -> Iterator[None]:
        """Record inside the context.

        Args:
            tokens: Tokens of a whole sequence without padding.
            parts: Number of equal parts of a sequence, each with its own sums.
            boundaries: Number of boundary positions: the last position of each of this many equal parts.
        """
        self.is_recording, self.sums = True, None
        self.tokens, self.parts, self.boundaries = tokens, parts, boundaries
        try:
            yield
        finally:
            self.is_recording = False

    def add(self, losses: Tensor, labels: Tensor, positions: Tensor) -> None:
        """Add the losses of one forward pass, without waiting for the device; nothing unless recording.

        Args:
            losses: Loss of each token, 0 for a label that does not count.
            labels: Labels of the same number of elements.
            positions: Positions in the whole sequence, of the same number of elements.
        """
        if not self.is_recording:
            return
        labels, positions = labels.flatten(), positions.flatten()
        values = torch.stack([losses.detach().flatten().double(), (labels != IGNORED_LABEL).double()])
        if self.sums is None:
            self.sums = values.new_zeros(2, self.parts + 1)
        part = positions * self.parts // self.tokens
        self.sums.index_add_(1, part.clamp(max=self.parts - 1), values)  # padding has no valid label
        piece, next_piece = (place * self.boundaries // self.tokens for place in (positions, positions + 1))
        self.sums[:, -1] += (values * (next_piece > piece)).sum(1)
