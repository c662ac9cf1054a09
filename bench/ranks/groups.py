"""Process groups of a cell, whose ranks are ordered as dp_replicate x dp_shard x sequence (innermost)."""

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
"""Seconds by which the timeout of collectives exceeds that of the launcher, so that the launcher reports a
hang."""


def collective_timeout(cell: Cell) -> timedelta:
    """Return the timeout of the cell's collectives.

    Every new group needs it, as torch's default for NCCL is 10 minutes.
    """
    return timedelta(seconds=cell.measure.timeout_s + DEADLINE_MARGIN_S)


def extend_group_timeouts(cell: Cell) -> None:
    """Set the cell's timeout on all existing process groups, including those of engines and packages.

    Otherwise NCCL's watchdog would end a rank after 10 minutes, even in a step that takes longer, and with a
    less useful message than the launcher's.
    """
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(collective_timeout(cell), group)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Process groups of one rank, and the positions of the rank in them."""

    rank: int
    world_size: int
    sequence: dist.ProcessGroup
    """Sequence group: the ranks that share a sequence."""
    sequence_rank: int
    """Position of this rank in its sequence group."""
    ulysses: dist.ProcessGroup
    """Ranks of the sequence group that split the heads with this rank: consecutive ranks unless the ring is
    inner."""
    ring: dist.ProcessGroup
    """Ranks of the sequence group that form a ring with this rank."""
    data_rank: int
    """Position of this rank's data-parallel group, which decides the sequences that the rank has a shard
    of."""
    shard_mesh: DeviceMesh
    """Mesh over which an engine shards parameters. It contains the sequence ranks, which engines treat like
    data-parallel ranks."""


def make_groups(cell: Cell) -> RankGroups:
    """Create the process groups of this rank; the default process group must exist."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # D data-parallel groups, S ranks of a sequence group
    ranks_DS = torch.arange(world_size).view(cell.dp_degree, cell.sp_degree)
    groups: dict[str, dist.ProcessGroup] = {}

    def group(rows: Tensor) -> dist.ProcessGroup:
        return _group(rows, groups, collective_timeout(cell))

    return RankGroups(
        rank=rank,
        world_size=world_size,
        sequence=group(ranks_DS),
        sequence_rank=rank % cell.sp_degree,
        ulysses=group(_group_rows(ranks_DS, cell.ulysses_degree, cell.ulysses_stride)),
        ring=group(_group_rows(ranks_DS, cell.ring_degree, cell.ring_stride)),
        data_rank=rank // cell.sp_degree,
        shard_mesh=_shard_mesh(cell),
    )


def _group_rows(ranks_DS: Tensor, size: int, stride: int) -> Tensor:
    """Return groups of `size` ranks of a sequence, one in each row, whose neighbours differ by `stride`."""
    blocks = ranks_DS.reshape(-1, size, stride)
    return blocks.transpose(1, 2).flatten(0, 1)


def _group(rows: Tensor, groups: dict[str, dist.ProcessGroup], timeout: timedelta) -> dist.ProcessGroup:
    """Return the process group of this rank, where each row of ranks is a group.

    All ranks must call this with the same rows. `groups` caches the result, so that equal rows share a group.
    """
    key = str(rows.tolist())
    if key not in groups:
        group: Any = dist.group.WORLD
        if len(rows) > 1:
            group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
        groups[key] = group
    return groups[key]


def _shard_mesh(cell: Cell) -> DeviceMesh:
    shard_ranks = cell.dp_shard * cell.sp_degree
    if cell.dp_replicate == 1:
        return init_device_mesh(cell.cluster.device, (shard_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(
        cell.cluster.device,
        (cell.dp_replicate, shard_ranks),
        mesh_dim_names=("replicate", "shard"),
    )
