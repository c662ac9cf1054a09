"""How known mistakes are made: subclasses of what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels import Kernel
from bench.config import NO_MISTAKE, Cell
from bench.ranks.groups import RankGroups
from bench.strategies.facts import StrategyFacts
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy, Wiring
from bench.training.data import count_valid
from bench.training.trainers.trainer import Trainer

StrategyClass = type[Strategy]
TrainerClass = type[Trainer]


def _as_it_is(code: Any) -> Any:
    return code


@dataclass(frozen=True, slots=True)
class Mistake:
    """What takes the place of a strategy's class and of a trainer's."""

    strategy: Callable[[StrategyClass], StrategyClass] = _as_it_is
    trainer: Callable[[TrainerClass], TrainerClass] = _as_it_is


def _mean_of_rank_means(right: Any) -> TrainerClass:
    class MeanOfRankMeans(right):  # type: ignore[misc]
        def loss_of(self, loss_sum: Tensor, batch: Batch, valid_tokens: Tensor) -> Tensor:  # noqa: ARG002
            cell: Cell = self.cell
            return loss_sum / (count_valid(batch.labels).clamp(min=1) * cell.grad_accum)

    return MeanOfRankMeans


def _labels_shifted_in_shards(right: Any) -> StrategyClass:
    class LabelsShiftedInShards(right):  # type: ignore[misc]
        def shard(self, batch: Batch) -> Batch:
            cut: Batch = super().shard(batch)
            shifted = torch.nn.functional.pad(cut.input_ids[:, 1:], (0, 1), value=IGNORED_LABEL)
            labels = shifted.masked_fill(cut.labels == IGNORED_LABEL, IGNORED_LABEL)
            return replace(cut, labels=labels)

    return LabelsShiftedInShards


def _gradients_divided_by_sp(right: Any) -> StrategyClass:
    class GradientsDividedBySp(right):  # type: ignore[misc]
        @contextmanager
        def install(self) -> Iterator[Wiring]:
            with super().install() as wiring:
                yield replace(wiring, gradient_divisor=wiring.gradient_divisor // self.cell.sp_degree)

    return GradientsDividedBySp


def _with_kernel(change: Callable[[Kernel], Kernel]) -> Callable[[Any], StrategyClass]:
    """A mistake of the kernel that a strategy calls."""

    def strategy(right: Any) -> StrategyClass:
        class OnAnotherKernel(right):  # type: ignore[misc]
            kernel: Kernel

            def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
                super().__init__(cell, groups, facts)
                self.kernel = change(self.kernel)

        return OnAnotherKernel

    return strategy


def _seeing_the_next_key(right: Kernel) -> Kernel:
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


def _own_block_in_backward(right: Kernel) -> Kernel:
    own: list[tuple[Tensor, Tensor]] = []

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if causal:  # a ring's first block is the rank's own
            own[:] = [(k, v)]
        k, v = (x[:, :, : k.shape[2]] for x in own[0])
        return right.backward(dout, q, k, v, out, lse, causal, scale)

    return replace(right, backward=backward, fills_gradients=False)


CODE: Mapping[str, Mistake] = {
    NO_MISTAKE: Mistake(),
    "mean_of_rank_means": Mistake(trainer=_mean_of_rank_means),
    "mask_off_by_one": Mistake(strategy=_with_kernel(_seeing_the_next_key)),
    "labels_shifted_in_shards": Mistake(strategy=_labels_shifted_in_shards),
    "gradients_divided_by_sp": Mistake(strategy=_gradients_divided_by_sp),
    "own_block_in_ring_backward": Mistake(strategy=_with_kernel(_own_block_in_backward)),
}
