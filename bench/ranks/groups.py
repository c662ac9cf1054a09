"""The ranks of a cell: dp_replicate x dp_shard x sequence, sequence innermost."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.config import Cell

DEADLINE_MARGIN_S = 60
"""Collectives outwait the launcher, so that a hang is the launcher's to report."""


def deadline(cell: Cell) -> timedelta:
    """How long a collective of the cell may take; a group that is not told has torch's 10 minutes on NCCL."""
    return timedelta(seconds=cell.measure.timeout_s + DEADLINE_MARGIN_S)


def outwait_the_launcher(cell: Cell) -> None:
    """Give all groups that exist the cell's deadline, also those that an engine or a package has made.

    NCCL's watchdog would end a rank after 10 minutes, of a step that may take as long, and say less.
    """
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(deadline(cell), group)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The process groups of one rank, and its place in them."""

    rank: int
    world_size: int
    sequence: dist.ProcessGroup
    """The ranks that share a sequence."""
    sequence_rank: int
    ulysses: dist.ProcessGroup
    """Of these, the ranks that share its heads: neighbours in rank, unless those of a ring are."""
    ring: dist.ProcessGroup
    """Of these, the ranks of one ring."""
    data_rank: int
    """Which sequences of a step this rank has a part of."""
    shard_mesh: DeviceMesh
    """What a sharding engine spreads parameters over: to it, sequence ranks are plain data-parallel ranks."""


def make_groups(cell: Cell) -> RankGroups:
    """The groups of this rank; the default process group must exist."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks_DP = torch.arange(world_size).view(cell.dp_degree, cell.sp_degree)
    made: dict[str, dist.ProcessGroup] = {}

    def group(rows: Tensor) -> dist.ProcessGroup:
        return _group(rows, made, deadline(cell))

    return RankGroups(
        rank=rank,
        world_size=world_size,
        sequence=group(ranks_DP),
        sequence_rank=rank % cell.sp_degree,
        ulysses=group(_strided(ranks_DP, cell.ulysses_degree, cell.ulysses_stride)),
        ring=group(_strided(ranks_DP, cell.ring_degree, cell.ring_stride)),
        data_rank=rank // cell.sp_degree,
        shard_mesh=_shard_mesh(cell),
    )


def _strided(ranks_DP: Tensor, size: int, stride: int) -> Tensor:
    """The ranks of each sequence in groups of `size`, neighbours `stride` apart: a group a row."""
    blocks = ranks_DP.reshape(-1, size, stride)
    return blocks.transpose(1, 2).flatten(0, 1)


def _group(rows: Tensor, made: dict[str, dist.ProcessGroup], timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group when each row is one; the same rows give the same group."""
    key = str(rows.tolist())
    if key not in made:
        group: Any = dist.group.WORLD
        if len(rows) > 1:
            group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
        made[key] = group
    return made[key]


def _shard_mesh(cell: Cell) -> DeviceMesh:
    shard_ranks = cell.dp_shard * cell.sp_degree
    if cell.dp_replicate == 1:
        return init_device_mesh(cell.cluster.device, (shard_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(
        cell.cluster.device,
        (cell.dp_replicate, shard_ranks),
        mesh_dim_names=("replicate", "shard"),
    )
