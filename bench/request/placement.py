"""The ranks of a cell: their device, their number, and how they divide the work."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from bench.common.environment import Machine
from bench.config import ClusterConfig, ConfigError
from bench.request import values
from bench.request.choices import Raw, options

CPU_RANKS = 2
MIN_CPU_LIMIT_GIB = 0.02
MAX_CPU_RANKS = 64
"""Where there are fewer cores: every rank is a process of some hundred megabytes."""
SLURM_NODES = "SLURM_JOB_NUM_NODES"
SLURM_GPUS = tuple(
    f"SLURM_{name}" for name in ("GPUS_ON_NODE", "JOB_GPUS", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK")
)
"""Of these one is set in a job that has GPUs, whatever way it asked for them."""
MAX_RANKS_PER_GPU = 16
"""Each has a CUDA context of half a gigabyte, and a collective waits for the GPU's time slices of all."""


GATHERED = ("nodes", "slurm")
"""Clusters of machines that agents run on."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ranks run."""

    name: str
    device: str
    ranks_per_gpu: int
    world_size: int
    """How many there may be."""
    nodes: int = 1
    """On so many machines, as many on each."""
    is_open: bool = False
    """Whether fewer may be taken: their number is left open, and GPUs of one machine may stay idle."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """The factors of the number of ranks."""

    sp_degree: int
    dp_replicate: int
    dp_shard: int

    @property
    def product(self) -> int:
        return self.sp_degree * self.dp_replicate * self.dp_shard


def place(raw: Raw, machine: Machine) -> Placement:
    """Device and number of ranks, filled in from what is there.

    Raises ConfigError for a request that the machine cannot fulfil.
    """
    device = _device(raw, machine)
    ranks_per_gpu = _ranks_per_gpu(raw, device)
    name = values.choice("cluster", raw["name"], options("cluster"))
    nodes = _nodes(raw, name)
    world_size = raw["world_size"]
    if world_size == "auto":
        world_size = nodes * (len(machine.gpus) * ranks_per_gpu if device == "cuda" else CPU_RANKS)
    world_size = values.whole("cluster.world_size", world_size)
    if name == "auto":
        name = "gpu" if device == "cuda" else "cpu"
    is_open = raw["world_size"] == "auto" and device == "cuda" and nodes == 1
    where = Placement(name, device, ranks_per_gpu, world_size, nodes, is_open)
    if world_size > (most := _most_ranks(where, machine)):
        raise ConfigError(_too_many("cluster.world_size", world_size, most, where, machine))
    return where


def _nodes(raw: Raw, name: str) -> int:
    """The number of machines; all of the allocation's under Slurm where it is left open."""
    nodes = raw["nodes"]
    if name == "slurm" and nodes == "auto":
        nodes = os.environ.get(SLURM_NODES) or 1  # outside of an allocation the sweep says so
    nodes = values.whole("cluster.nodes", nodes)
    if nodes > 1 and name not in GATHERED:
        raise ConfigError(
            f"cluster.nodes={nodes}: cluster={name} is this machine; take cluster=slurm inside of a Slurm"
            " allocation, or cluster=nodes"
        )
    return nodes


def _ranks_per_gpu(raw: Raw, device: str) -> int:
    key = "cluster.ranks_per_gpu"
    ranks = values.whole(key, raw["ranks_per_gpu"])
    if ranks > 1 and device != "cuda":
        raise ConfigError(f"{key}={ranks}: the ranks run on the CPU, not on a GPU; write {key}=1")
    if ranks > MAX_RANKS_PER_GPU:
        raise ConfigError(
            f"{key}={ranks}: at most {MAX_RANKS_PER_GPU} ranks share a GPU; write for example {key}=4"
        )
    return ranks


def _most_ranks(where: Placement, machine: Machine) -> int:
    gpu_ranks, cpu_ranks = len(machine.gpus) * where.ranks_per_gpu, max(MAX_CPU_RANKS, machine.cores)
    return where.nodes * (gpu_ranks if where.device == "cuda" else cpu_ranks)


def _too_many(key: str, ranks: int, most: int, where: Placement, machine: Machine) -> str:
    """Return the message about more ranks than there may be at most."""
    nodes = f" on {where.nodes} nodes" if where.nodes > 1 else ""
    if where.device != "cuda":
        return f"{key}={ranks}: {most} CPU ranks are the most{nodes}; write {key}={most}, or less"
    gpus = f"{len(machine.gpus)} {'GPU is' if len(machine.gpus) == 1 else 'GPUs are'} visible{nodes}"
    if where.ranks_per_gpu > 1:
        gpus += f" and cluster.ranks_per_gpu={where.ranks_per_gpu}"
    way_out = f"write {key}={most}, or less"
    needed = math.ceil(ranks / where.nodes / len(machine.gpus))
    if needed <= MAX_RANKS_PER_GPU:
        way_out += f", or let ranks share GPUs, for correctness only, with cluster.ranks_per_gpu={needed}"
    return f"{key}={ranks}: {gpus}; {way_out}"


def _device(raw: Raw, machine: Machine) -> str:
    device: str = raw["device"]
    if device != "cpu" and machine.gpu_error is not None:
        raise ConfigError(f"cluster.device={device}: {machine.gpu_error}, or take cluster=cpu")
    if device == "auto":
        if raw["name"] == "slurm" and not machine.gpus:
            _refuse_unseen_gpus()
        device = "cuda" if machine.gpus else "cpu"
    values.choice("cluster.device", device, ("cpu", "cuda"))
    if device == "cuda" and not machine.gpus:
        asked = "cluster=gpu" if raw["name"] == "gpu" else "cluster.device=cuda"
        raise ConfigError(f"{asked}: no GPU is visible here; take cluster=cpu, or check CUDA_VISIBLE_DEVICES")
    return device


def _refuse_unseen_gpus() -> None:
    """Raises ConfigError on a login node: the sweep would take the CPUs of nodes that have GPUs."""
    of_job = [f"{name}={os.environ[name]}" for name in SLURM_GPUS if os.environ.get(name, "0") != "0"]
    if of_job:
        raise ConfigError(
            f"cluster=slurm: the job has GPUs ({of_job[0]}), none of which is visible here; start the"
            " sweep on one of its nodes, by sbatch or srun --overlap --nodes=1 --ntasks=1 --gpus-per-node=,"
            " or write cluster.device=cpu"
        )


def degrees(raw: Raw, where: Placement) -> Degrees:
    """How many ranks share a sequence, and how many sequences run side by side.

    What is left at `auto` takes the ranks that are left; where nothing is, legality compares the product
    with the number of ranks.
    """
    replicate = values.whole("dp_replicate", raw["dp_replicate"])
    shard = _known("dp_shard", raw["dp_shard"])
    sp_degree = _known("sp_degree", raw["sp_degree"])
    left = max(1, where.world_size // (replicate * (shard or 1) * (sp_degree or 1)))
    if sp_degree is None:
        return Degrees(shared_ranks(where, left), replicate, shard or 1)
    return Degrees(sp_degree, replicate, shard or left)


def shared_ranks(where: Placement, ranks: int) -> int:
    """How many of these ranks share a sequence where nobody says so: where GPUs may stay idle a power of two.

    That divides the heads and lengths of most models.
    """
    return 1 << (ranks.bit_length() - 1) if where.is_open else ranks


def ranks_taken(where: Placement, spread: Degrees) -> int:
    """The ranks of a cell that shares sequences: all, or those its degrees need where GPUs may stay idle."""
    return spread.product if where.is_open and spread.product <= where.world_size else where.world_size


def of_fewer_ranks(cluster: ClusterConfig, ranks: int) -> ClusterConfig:
    """The part of a cluster that so many ranks need."""
    nodes = cluster.nodes_of(ranks)
    return replace(
        cluster,
        world_size=ranks,
        nodes=nodes,
        network=cluster.network if nodes > 1 else None,
        ranks_per_gpu=min(cluster.ranks_per_gpu, ranks),
    )


def unshared_degrees(raw: Raw, where: Placement, machine: Machine) -> Degrees:
    """Degrees of a cell that shares no sequence: one rank, unless data parallelism is requested.

    Neither sp_degree nor the cluster's size changes what such a cell does.
    """
    _known("sp_degree", raw["sp_degree"])
    replicate = values.whole("dp_replicate", raw["dp_replicate"])
    shard = _known("dp_shard", raw["dp_shard"]) or 1
    ranks = replicate * shard
    if ranks > (most := _most_ranks(where, machine)):
        raise ConfigError(_too_many("dp_replicate x dp_shard", ranks, most, where, machine))
    if ranks > where.world_size and raw["cluster"]["world_size"] != "auto":
        raise ConfigError(
            f"dp_replicate x dp_shard = {ranks} ranks, but cluster.world_size={where.world_size};"
            f" write cluster.world_size={ranks}"
        )
    return Degrees(1, replicate, shard)


def threads_per_rank(raw: Raw, machine: Machine, ranks: int) -> int:
    """The requested number, or an equal share of the cores for so many ranks a machine, at least one."""
    if raw["threads_per_rank"] == "auto":
        return max(1, machine.cores // ranks)
    threads = values.whole("cluster.threads_per_rank", raw["threads_per_rank"])
    if threads > machine.cores:
        raise ConfigError(
            f"cluster.threads_per_rank={threads}: this process may use {machine.cores} cores; write"
            f" cluster.threads_per_rank={machine.cores}"
        )
    return threads


def memory_limit_gib(value: Any, device: str) -> float:
    """Return how much one rank may allocate.

    On the CPU a limit under MIN_CPU_LIMIT_GIB would end a rank before it can report why.
    """
    key = "cluster.memory_limit_gib"
    limit_gib = values.positive(key, value, example="0.5")
    if device == "cpu" and limit_gib < MIN_CPU_LIMIT_GIB:
        raise ConfigError(
            f"{key}={value}: CPU ranks need at least {MIN_CPU_LIMIT_GIB} to start; write for example"
            f" {key}=0.1, or null for no limit"
        )
    return limit_gib


def _known(key: str, value: Any) -> int | None:
    return None if value == "auto" else values.whole(key, value)
