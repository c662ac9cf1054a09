"""Sums over every parameter's gradient in one full-length step, from the optimizer's state around the step.

AdamW updates its moments linearly: m <- beta1 m + (1 - beta1) g and v <- beta2 v + (1 - beta2) g^2. A linear
function of g, or of g^2, therefore follows from the same function of the moments before and after the update.
The step itself is not touched, and no gradient is gathered or copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.losses.section import SIGNED_SUMS
from bench.training.data import splitmix64
from bench.training.engines.engine import Engine
from bench.training.optimizer_facts import BETAS, OPTIMIZER_FACTS

CHUNK = 2**20
"""Number of elements that are hashed at once; each takes eight bytes of memory."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's running means of gradients and of squared gradients."""


@dataclass(frozen=True, slots=True)
class MomentSums:
    """Sums over the optimizer's moments of all ranks."""

    names: Sequence[str]
    """Names of the parameters."""
    signed: Tensor
    """Sums of the first moment's elements with random signs, [parameters, SIGNED_SUMS]."""
    squares: Tensor
    """Sum of the second moment's elements, [parameters]."""

    def gradients_since(self, before: MomentSums) -> dict[str, list[float]]:
        """Return each parameter's sums over the gradient of the only update since `before`.

        Returns:
            The Euclidean norm of the clipped gradient, then SIGNED_SUMS sums of its elements with signs, by
            parameter.
        """
        beta1, beta2 = BETAS
        signed = (self.signed - beta1 * before.signed) / (1 - beta1)
        squares = (self.squares - beta2 * before.squares) / (1 - beta2)
        return _rows_by_name(self.names, torch.cat([squares.clamp(min=0).sqrt()[:, None], signed], dim=1))


def sum_first_moment(engine: Engine, device: torch.device) -> dict[str, list[float]]:
    """Return the norm of each parameter's first moment, then SIGNED_SUMS sums of its elements with signs.

    The first moment is linear in the gradients of all steps so far. Every rank must call this function.
    """
    key = OPTIMIZER_FACTS[engine.cell.optimizer.name].state_keys[0]
    moments = dict(engine.optimizer_state(key))
    offsets, is_first_replica = shard_offsets(engine, [*moments.values()], device)
    sums = torch.zeros(len(moments), SIGNED_SUMS + 1, dtype=torch.float64, device=device)
    if is_first_replica:
        for row, (name, moment), offset in zip(sums, moments.items(), offsets, strict=True):
            row[0] = moment.square().sum(dtype=torch.float64).to(device)
            row[1:] = signed_sums(moment, name, offset).to(device)
    dist.all_reduce(sums)
    return _rows_by_name(moments, torch.cat([sums[:, :1].sqrt(), sums[:, 1:]], dim=1))


def sum_moments(engine: Engine, device: torch.device) -> MomentSums:
    """Return the sums over all shards, with replicas counted once; every rank must call it."""
    first, second = (dict(engine.optimizer_state(key)) for key in MOMENTS)
    offsets, is_first_replica = shard_offsets(engine, [*first.values()], device)
    sums = torch.zeros(len(first), SIGNED_SUMS + 1, dtype=torch.float64, device=device)
    if is_first_replica:
        for row, name, offset in zip(sums, first, offsets, strict=True):
            row[:-1] = signed_sums(first[name], name, offset).to(device)
            row[-1] = second[name].sum(dtype=torch.float64).to(device)
    dist.all_reduce(sums)
    return MomentSums([*first], sums[:, :-1], sums[:, -1])


def _rows_by_name(names: Iterable[str], sums: Tensor) -> dict[str, list[float]]:
    """Return the row of `sums` of each name, with seven digits, which are shorter in a record."""
    rows = sums.tolist()
    return {name: [float(f"{number:.6e}") for number in row] for name, row in zip(names, rows, strict=True)}


def signed_sums(values: Tensor, name: str, offset: int) -> Tensor:
    """Return sums, [SIGNED_SUMS], of a shard's elements with random signs.

    A hash of the parameter's name and of the element's index in the whole parameter gives an element its sign
    and the one sum to which it adds. `offset` is the index of the shard's first element.
    """
    flat = values.detach().flatten()
    total = torch.zeros(SIGNED_SUMS, dtype=torch.float64, device=values.device)
    key = zlib.crc32(name.encode()) << 31
    places = torch.arange(min(CHUNK, flat.numel()), device=values.device)
    for first, chunk in zip(range(offset, offset + flat.numel(), CHUNK), flat.split(CHUNK), strict=True):
        hashes = splitmix64(places[: chunk.numel()] + (key + first))
        signs = ((hashes >> 8) & 1) * 2 - 1
        total += torch.bincount(hashes & (SIGNED_SUMS - 1), chunk.double() * signs, SIGNED_SUMS)
    return total


def shard_offsets(engine: Engine, shards: Sequence[Tensor], device: torch.device) -> tuple[list[int], bool]:
    """Return the index of each shard's first element in the flat parameter; every rank must call it.

    Returns:
        The offsets of this rank's `shards`, and whether no lower rank holds replicas of them.
    """
    own = torch.tensor([engine.shard_index, *(shard.numel() for shard in shards)], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    sizes: dict[int, tuple[int, list[int]]] = {}
    for rank, row in enumerate(torch.stack(gathered).tolist()):
        sizes.setdefault(row[0], (rank, row[1:]))
    lower = [size for index, (_, size) in sizes.items() if index < engine.shard_index]
    offsets = [sum(column) for column in zip(*lower, strict=True)] if lower else [0] * len(shards)
    return offsets, sizes[engine.shard_index][0] == dist.get_rank()
