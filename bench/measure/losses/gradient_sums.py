"""Sums over every parameter's gradient, from the optimizer's first moment before and after a step.

The first moment is linear in the gradient g: m <- decay * m + share * g. A linear function of g therefore
follows from the same function of the moments before and after the update. The step itself is not touched, and
no gradient is gathered or copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.losses.section import SIGNED_SUMS
from bench.training.data import splitmix64
from bench.training.engines.engine import Engine
from bench.training.optimizer_facts import OPTIMIZER_FACTS, OptimizerFacts

CHUNK = 2**20
"""Number of elements that are hashed at once; each takes eight bytes of memory."""
Sums = Mapping[str, Sequence[float]]
"""SIGNED_SUMS sums of the elements with random signs, by parameter."""


def sum_first_moment(engine: Engine, device: torch.device) -> Sums:
    """Return the sums over all shards of the first moment, with replicas counted once.

    Every rank must call this function.
    """
    moments = dict(engine.optimizer_state(OPTIMIZER_FACTS[engine.cell.optimizer.name].state_keys[0]))
    offsets, is_first_replica = shard_offsets(engine, [*moments.values()], device)
    sums = torch.zeros(len(moments), SIGNED_SUMS, dtype=torch.float64, device=device)
    if is_first_replica:
        for row, (name, moment), offset in zip(sums, moments.items(), offsets, strict=True):
            row[:] = signed_sums(moment, name, offset).to(device)
    dist.all_reduce(sums)
    return dict(zip(moments, sums.tolist(), strict=True))


def sums_of_gradient(before: Sums, after: Sums, optimizer: OptimizerFacts) -> Sums:
    """Return the sums over the gradient of the only update between two sums over the first moment."""
    decay, share = optimizer.decay, optimizer.first_share
    return {
        name: [(new - decay * old) / share for old, new in zip(before[name], sums, strict=True)]
        for name, sums in after.items()
    }


def with_seven_digits(sums: Sums) -> Sums:
    """Return the sums as they are stored in a record, where they take less space."""
    return {name: [float(f"{number:.6e}") for number in row] for name, row in sums.items()}


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
