"""Code of the known mistakes: subclasses of the right strategies and trainers, and changed kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels import Kernel
from bench.config import NO_FAULT, Cell
from bench.ranks.groups import RankGroups
from bench.strategies.facts import StrategyFacts
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy, Wiring
from bench.training.data import count_valid
from bench.training.trainers.trainer import Trainer

StrategyClass = type[Strategy]
TrainerClass = type[Trainer]


def _identity(code: Any) -> Any:
    return code


@dataclass(frozen=True, slots=True)
class Mistake:
    """Two functions that return a class with a known mistake for the right class."""

    strategy: Callable[[StrategyClass], StrategyClass] = _identity
    trainer: Callable[[TrainerClass], TrainerClass] = _identity


def _mean_of_rank_means(right: Any) -> TrainerClass:
    class MeanOfRankMeans(right):  # type: ignore[misc]
        def loss_of(self, loss_sum: Tensor, batch: Batch, valid_tokens: Tensor) -> Tensor:  # noqa: ARG002
            cell: Cell = self.cell
            return loss_sum / (count_valid(batch.labels).clamp(min=1) * cell.grad_accum)

    return MeanOfRankMeans


def _labels_shifted_in_shards(right: Any) -> StrategyClass:
    class LabelsShiftedInShards(right):  # type: ignore[misc]
        def shard(self, batch: Batch) -> Batch:
            shard: Batch = super().shard(batch)
            shifted = torch.nn.functional.pad(shard.input_ids[:, 1:], (0, 1), value=IGNORED_LABEL)
            labels = shifted.masked_fill(shard.labels == IGNORED_LABEL, IGNORED_LABEL)
            return replace(shard, labels=labels)

    return LabelsShiftedInShards


def _gradients_divided_by_sp(right: Any) -> StrategyClass:
    class GradientsDividedBySp(right):  # type: ignore[misc]
        @contextmanager
        def install(self) -> Iterator[Wiring]:
            with super().install() as wiring:
                yield replace(wiring, gradient_divisor=wiring.gradient_divisor // self.cell.sp_degree)

    return GradientsDividedBySp


def _with_kernel(change: Callable[[Kernel], Kernel]) -> Callable[[Any], StrategyClass]:
    """Return a function from a strategy's class to a subclass that calls a changed kernel."""

    def strategy(right: Any) -> StrategyClass:
        class WithChangedKernel(right):  # type: ignore[misc]
            kernel: Kernel

            def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
                super().__init__(cell, groups, facts)
                self.kernel = change(self.kernel)

        return WithChangedKernel

    return strategy


def _mask_off_by_one(right: Kernel) -> Kernel:
    """Return a kernel whose causal mask lets each query see its successor, by rolling keys and values."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        shift = -1 if causal else 0
        return right.forward(q, k.roll(shift, 2), v.roll(shift, 2), causal, scale)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        shift = -1 if causal else 0
        dq, dk, dv = right.backward(dout, q, k.roll(shift, 2), v.roll(shift, 2), out, lse, causal, scale)
        return dq, dk.roll(-shift, 2), dv.roll(-shift, 2)

    return replace(right, forward=forward, backward=backward, fills_gradients=False)


def _local_block_in_backward(right: Kernel) -> Kernel:
    """Return a kernel whose backward uses the rank's local keys and values for every block of a ring."""
    local: list[tuple[Tensor, Tensor]] = []

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if causal:  # the first block of a ring is the local one
            local[:] = [(k, v)]
        k, v = (x[:, :, : k.shape[2]] for x in local[0])
        return right.backward(dout, q, k, v, out, lse, causal, scale)

    return replace(right, backward=backward, fills_gradients=False)


MISTAKE_CODE: Mapping[str, Mistake] = {
    NO_FAULT: Mistake(),
    "mean_of_rank_means": Mistake(trainer=_mean_of_rank_means),
    "mask_off_by_one": Mistake(strategy=_with_kernel(_mask_off_by_one)),
    "labels_shifted_in_shards": Mistake(strategy=_labels_shifted_in_shards),
    "gradients_divided_by_sp": Mistake(strategy=_gradients_divided_by_sp),
    "own_block_in_ring_backward": Mistake(strategy=_with_kernel(_local_block_in_backward)),
}
