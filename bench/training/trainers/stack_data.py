"""The samples of a cell, in the order and under the names in which a training stack deals them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.config import RunConfig
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import StepData

NEXT_LABELS = "next_labels"
"""A column with every token's label. DeepSpeed's loader makes `shift_labels` of `labels` by itself, and the
last token of each sequence gets none; with this column it has the label that it has in the native loop."""
SHIFT_LABELS = "shift_labels"
SAMPLES = 2**30
"""How many a loader believes there are: who asks for steps decides when the loop ends."""

Row = Mapping[str, Tensor]


class StackSamples(Dataset[Row]):
    """From step `first` on, `StepData`'s samples as a stack's distributed sampler asks for them."""

    def __init__(self, data: StepData, first: int, seq_len: int, *, shares_batches: bool) -> None:
        """With `shares_batches` the ranks of a sequence group each load a batch and train on all of them."""
        self.data = data
        self.first = first
        self.seq_len = seq_len
        self.ranks = data.cell.sp_degree if shares_batches else 1
        self.label_column = NEXT_LABELS if shares_batches else SHIFT_LABELS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Row:
        """One sequence, [seq_len] by column."""
        cell = self.data.cell
        batch, place = divmod(index, cell.batch)
        micro_step, group = dealt(cell, batch, self.ranks)
        step, within = divmod(micro_step, cell.grad_accum)
        whole = self.data.rows(self.first + step, within, group, self.seq_len)
        ids, labels = whole.input_ids[place], whole.labels[place]
        unshifted = torch.cat([labels.new_full((1,), IGNORED_LABEL), labels[:-1]])
        return {
            "input_ids": ids,
            "position_ids": whole.position_ids[place],
            "labels": unshifted,
            self.label_column: labels,
        }


def dealt(cell: RunConfig, batch: int, ranks: int) -> tuple[int, int]:
    """Micro-step, counted over all steps, and data-parallel group of a loader's batch.

    Batches go to processes in turn; of those, `ranks` neighbours train on one another's, first rank first.
    """
    round_, process = divmod(batch, cell.dp_degree * ranks)
    group, place = divmod(process, ranks)
    return round_ * ranks + place, group


def collated(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows as a batch, [B, seq_len] by column."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loader(samples: StackSamples) -> DataLoader[Any]:
    """A plain loader that keeps the order; it pins rows for a GPU, as Trainer's does."""
    return DataLoader(
        samples,
        batch_size=samples.data.cell.batch,
        collate_fn=collated,
        shuffle=False,
        pin_memory=samples.data.device.type == "cuda",
    )
