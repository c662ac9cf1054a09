"""Faults in the tokens, labels and positions of a rank, and in the divisor of its loss."""

from dataclasses import replace

import torch

from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy
from bench.training.engines.ddp.engine import DDP
from bench.training.trainers import native
from tests.support.faults.classes.tampering import wrap


def forget_to_shard_rank_1(job):
    """Give rank 1 the first shard as well, a silent fault of real trainers."""

    def first_shard(self, batch):
        size = batch.input_ids.shape[1] // self.cell.sp_degree
        parts = (batch.input_ids, batch.labels, batch.position_ids)
        return Batch(batch.samples, *(part[:, :size] for part in parts))

    if job.rank == 1:
        Strategy.shard = first_shard


def contiguous_positions_with_zigzag(job):
    """Combine tokens in the zigzag layout with positions in the contiguous layout."""

    def misplaced(plain, self, batch):
        right = plain(self, batch)
        size = right.input_ids.shape[1]
        start = self.groups.sequence_rank * size
        return replace(right, position_ids=batch.position_ids[:, start : start + size])

    wrap(Strategy, "shard", misplaced)


def let_positions_go_on(job):
    """Let positions go on in the next document, which does not change attention with rotary positions."""

    def with_positions(plain, self, batch):
        tokens = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        return plain(self, replace(batch, position_ids=tokens))

    wrap(Strategy, "shard", with_positions)


def label_the_last_token_of_documents(job):
    """Label a document's last token with the next document's first, from the first counted label on."""

    def with_labels(plain, self, batch):
        follows = batch.position_ids.roll(-1, dims=1) == 0
        follows[:, -1] = False
        follows &= (batch.labels != IGNORED_LABEL).long().cummax(dim=1).values.bool()
        labels = torch.where(follows, batch.input_ids.roll(-1, dims=1), batch.labels)
        return plain(self, replace(batch, labels=labels))

    wrap(Strategy, "shard", with_labels)


def feed_other_tokens_than_were_fetched(job):
    """Put a wrapper between loop and model that moves the last token to the front."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, ids, labels, positions):
            return self.module(ids.roll(1, dims=1), labels, positions)

    def built(plain, self, *words):
        plain(self, *words)
        self.module = Wrapper(self.module)

    wrap(DDP, "__init__", built)


def divide_by_sp_degree(job):
    """Divide the loss once more by the number of ranks that share a sequence, a classic mistake."""
    wrap(native, "backward_loss", lambda plain, *loss: plain(*loss) / job.cell.sp_degree)


def average_losses_over_ranks(job):
    """Average the ranks' means, so that tokens of ranks with few valid tokens weigh more."""
    local = []

    def count_valid(plain, labels):
        local.append(plain(labels))
        return local[-1]

    wrap(native, "count_valid", count_valid)
    native.backward_loss = lambda loss_sum, *_: loss_sum / local[-1].clamp(min=1)
