"""The ranks of a cell: dp_replicate x dp_shard x sequence, sequence innermost."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.config import RunConfig


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Where one rank stands.

    `sequence` holds the ranks that share a sequence, `data_rank` tells which sequences they share.
    `shard_mesh` is what a sharding engine spreads parameters over: to it, sequence ranks are plain
    data-parallel ranks.
    """

    rank: int
    world_size: int
    sequence: dist.ProcessGroup
    sequence_rank: int
    data_rank: int
    shard_mesh: DeviceMesh


def make_groups(cell: RunConfig) -> RankGroups:
    """The groups of this rank; the default process group must exist."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return RankGroups(
        rank=rank,
        world_size=world_size,
        sequence=_sequence_group(cell.sp_degree, world_size),
        sequence_rank=rank % cell.sp_degree,
        data_rank=rank // cell.sp_degree,
        shard_mesh=_shard_mesh(cell),
    )


def _sequence_group(sp_degree: int, world_size: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.group.WORLD
    if sp_degree < world_size:
        group = dist.new_subgroups(group_size=sp_degree)[0]
    assert group is not None
    return group


def _shard_mesh(cell: RunConfig) -> DeviceMesh:
    shard_ranks = cell.dp_shard * cell.sp_degree
    if cell.dp_replicate == 1:
        return init_device_mesh(cell.cluster.device, (shard_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(
        cell.cluster.device,
        (cell.dp_replicate, shard_ranks),
        mesh_dim_names=("replicate", "shard"),
    )
