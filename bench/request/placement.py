"""Placement of a cell's ranks: their device, their number and their degrees of parallelism."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from bench.common.environment import Machine
from bench.common.labels import value_label
from bench.config import ClusterConfig, ConfigError
from bench.request import values
from bench.request.choices import Raw, options

CPU_RANKS = 2
"""Number of CPU ranks of a machine if the request leaves it open."""
MIN_CPU_LIMIT_GIB = 0.02
"""Smallest memory limit with which a CPU rank can start."""
MAX_CPU_RANKS = 64
"""Largest number of CPU ranks on a machine with fewer cores; a rank takes some hundred megabytes."""
SLURM_NODES = "SLURM_JOB_NUM_NODES"
"""Environment variable with the number of nodes of a Slurm allocation."""
SLURM_NODE_NAMES = "SLURM_JOB_NODELIST"
"""Environment variable with the names of these nodes, as `scontrol show hostnames` reads them."""
SLURM_GPUS = tuple(
    f"SLURM_{name}" for name in ("GPUS_ON_NODE", "JOB_GPUS", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK")
)
"""Environment variables of which at least one is set in a Slurm job with GPUs."""
MAX_RANKS_PER_GPU = 16
"""Largest number of ranks on a GPU.

A rank has a CUDA context of half a gigabyte, and a collective waits until every rank has had its time slice.
"""
HOST = re.compile(r"[^\s-]\S*")
"""Pattern of a machine's name. ssh would take a name that begins with a dash for an option."""
MULTI_NODE_CLUSTERS = ("nodes", "slurm")
"""Choices of `cluster` with several machines, on which agents (processes on other nodes) start the ranks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and number of ranks that a request asks for; a cell may use fewer ranks."""

    name: str
    device: str
    ranks_per_gpu: int
    world_size: int
    """Number of ranks; the largest one if `is_open`."""
    nodes: int = 1
    """Number of machines, with the same number of ranks on each."""
    is_open: bool = False
    """Whether GPUs may stay idle, because the request leaves the number of ranks open."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism, whose product is the number of ranks."""

    sp_degree: int
    dp_replicate: int
    dp_shard: int

    @property
    def product(self) -> int:
        return self.sp_degree * self.dp_replicate * self.dp_shard


def place(raw: Raw, machine: Machine) -> Placement:
    """Return the placement that the section `cluster` of a request asks for, with `auto` filled in.

    Raises ConfigError for a request that the machine cannot fulfil.
    """
    device = _find_device(raw, machine)
    ranks_per_gpu = _ranks_per_gpu(raw, device)
    name = values.choice("cluster", raw["name"], options("cluster"))
    nodes = node_count(raw, name)
    world_size = raw["world_size"]
    if world_size == "auto":
        world_size = nodes * (len(machine.gpus) * ranks_per_gpu if device == "cuda" else CPU_RANKS)
    world_size = values.whole_number("cluster.world_size", world_size)
    if name == "auto":
        name = "gpu" if device == "cuda" else "cpu"
    is_open = raw["world_size"] == "auto" and device == "cuda" and nodes == 1
    placement = Placement(name, device, ranks_per_gpu, world_size, nodes, is_open)
    if world_size > (largest := _max_ranks(placement, machine)):
        raise ConfigError(_too_many_message("cluster.world_size", world_size, largest, placement, machine))
    return placement


def node_count(raw: Raw, name: str) -> int:
    """Return the number of machines; `auto` means all nodes of the Slurm allocation, or all `hosts`."""
    nodes = raw["nodes"]
    if name == "slurm" and nodes == "auto":
        nodes = os.environ.get(SLURM_NODES) or 1
    if name == "nodes" and nodes == "auto":
        nodes = len(hosts(raw))
    nodes = values.whole_number("cluster.nodes", nodes)
    if name == "nodes" and raw["hosts"] is not None and nodes > (count := len(hosts(raw))):
        raise ConfigError(f"cluster.nodes={nodes}: cluster.hosts names {count}; write cluster.nodes={count}")
    if nodes > 1 and name not in MULTI_NODE_CLUSTERS:
        raise ConfigError(
            f"cluster.nodes={nodes}: cluster={name} is this machine alone; take cluster=slurm in a Slurm"
            " allocation, or cluster=nodes"
        )
    return nodes


def hosts(raw: Raw) -> list[str]:
    """Return the machines that `cluster.hosts` names; raise ConfigError if it names none, or one twice."""
    value = raw["hosts"]
    names = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    names = [str(name).strip() for name in names]
    bad = [name for name in names if not HOST.fullmatch(name) or names.count(name) > 1]
    if bad or not names:
        given = value_label(value if isinstance(value, str) else ",".join(names) or "null")
        rule = f"{bad[0]} occurs twice" if bad and HOST.fullmatch(bad[0]) else "must name machines"
        raise ConfigError(f"cluster.hosts={given}: {rule}; write for example cluster.hosts=a,b")
    return names


def _ranks_per_gpu(raw: Raw, device: str) -> int:
    key = "cluster.ranks_per_gpu"
    ranks = values.whole_number(key, raw["ranks_per_gpu"])
    if ranks > 1 and device != "cuda":
        raise ConfigError(f"{key}={ranks}: the ranks run on the CPU, not on a GPU; write {key}=1")
    if ranks > MAX_RANKS_PER_GPU:
        raise ConfigError(
            f"{key}={ranks}: at most {MAX_RANKS_PER_GPU} ranks share a GPU; write for example {key}=4"
        )
    return ranks


def _max_ranks(placement: Placement, machine: Machine) -> int:
    """Return the largest number of ranks that the nodes of a placement may run."""
    gpu_ranks, cpu_ranks = len(machine.gpus) * placement.ranks_per_gpu, max(MAX_CPU_RANKS, machine.cores)
    return placement.nodes * (gpu_ranks if placement.device == "cuda" else cpu_ranks)


def _too_many_message(key: str, ranks: int, largest: int, placement: Placement, machine: Machine) -> str:
    """Return the message that refuses `ranks` ranks, which are more than `largest`."""
    nodes = f" on {placement.nodes} nodes" if placement.nodes > 1 else ""
    if placement.device != "cuda":
        return (
            f"{key}={ranks}: at most {largest} CPU ranks are allowed{nodes}; write {key}={largest}, or less"
        )
    gpus = f"{len(machine.gpus)} {'GPU is' if len(machine.gpus) == 1 else 'GPUs are'} visible{nodes}"
    if placement.ranks_per_gpu > 1:
        gpus += f" and cluster.ranks_per_gpu={placement.ranks_per_gpu}"
    way_out = f"write {key}={largest}, or less"
    needed = math.ceil(ranks / placement.nodes / len(machine.gpus))
    if needed <= MAX_RANKS_PER_GPU:
        way_out += f", or check results only, with ranks that share GPUs: cluster.ranks_per_gpu={needed}"
    return f"{key}={ranks}: {gpus}; {way_out}"


def _find_device(raw: Raw, machine: Machine) -> str:
    """Return `cpu` or `cuda`; raise ConfigError for a device that the machine does not have."""
    device: str = raw["device"]
    if device != "cpu" and machine.gpu_error is not None:
        raise ConfigError(f"cluster.device={device}: {machine.gpu_error}, or take cluster=cpu")
    if device == "auto":
        if raw["name"] == "slurm" and not machine.gpus:
            _refuse_login_node()
        device = "cuda" if machine.gpus else "cpu"
    values.choice("cluster.device", device, ("cpu", "cuda"))
    if device == "cuda" and not machine.gpus:
        word = "cluster=gpu" if raw["name"] == "gpu" else "cluster.device=cuda"
        raise ConfigError(f"{word}: no GPU is visible here; take cluster=cpu, or check CUDA_VISIBLE_DEVICES")
    return device


def refuse_no_allocation() -> None:
    """Raise ConfigError outside of a Slurm allocation."""
    if not os.environ.get(SLURM_NODE_NAMES):
        raise ConfigError(
            f"cluster=slurm: this is no Slurm allocation ({SLURM_NODE_NAMES} is not set); start the sweep by"
            " sbatch or salloc, plan it with mode=predict hardware=..., or use cluster=nodes"
        )


def _refuse_login_node() -> None:
    """Raise ConfigError if the Slurm job has GPUs, since this machine has none and would use CPUs."""
    variables = [f"{name}={os.environ[name]}" for name in SLURM_GPUS if os.environ.get(name, "0") != "0"]
    if variables:
        raise ConfigError(
            f"cluster=slurm: the job has GPUs ({variables[0]}), but none is visible here; start the sweep on"
            " a node of the job, by sbatch or srun --overlap --nodes=1 --ntasks=1 --gpus-per-node=, or write"
            " cluster.device=cpu"
        )


def degrees(raw: Raw, placement: Placement) -> Degrees:
    """Return the degrees of a cell whose ranks share sequences.

    `sp_degree=auto` takes the ranks that the other degrees leave, and `dp_shard=auto` then is 1. With a
    number for `sp_degree`, `dp_shard=auto` takes the ranks that are left. The product may differ from the
    number of ranks; `bench.request.legality` refuses such a cell.
    """
    replicate = values.whole_number("dp_replicate", raw["dp_replicate"])
    shard = _number_unless_auto("dp_shard", raw["dp_shard"])
    sp_degree = _number_unless_auto("sp_degree", raw["sp_degree"])
    remaining = max(1, placement.world_size // (replicate * (shard or 1) * (sp_degree or 1)))
    if sp_degree is None:
        return Degrees(default_sp_degree(placement, remaining), replicate, shard or 1)
    return Degrees(sp_degree, replicate, shard or remaining)


def default_sp_degree(placement: Placement, ranks: int) -> int:
    """Return the number of ranks, of `ranks`, that share a sequence by default.

    It is `ranks`. If GPUs may stay idle it is the largest power of two in it, which divides the numbers of
    heads and the lengths of most cells.
    """
    return 1 << (ranks.bit_length() - 1) if placement.is_open else ranks


def used_ranks(placement: Placement, requested: Degrees) -> int:
    """Return the number of ranks of a cell that shares sequences.

    It is that of the placement, or if GPUs may stay idle the product of the degrees unless that is larger.
    """
    return min(requested.product, placement.world_size) if placement.is_open else placement.world_size


def shrink_cluster(cluster: ClusterConfig, ranks: int) -> ClusterConfig:
    """Return the cluster with `ranks` ranks on as few of its nodes as can hold them.

    On a single node it has no network.
    """
    nodes = min(cluster.nodes, cluster.min_nodes_for(ranks))
    return replace(
        cluster,
        world_size=ranks,
        nodes=nodes,
        network=cluster.network if nodes > 1 else None,
        ranks_per_gpu=min(cluster.ranks_per_gpu, ranks),
    )


def unshared_degrees(raw: Raw, placement: Placement, machine: Machine) -> Degrees:
    """Return the degrees of a cell that shares no sequence: one rank, unless data parallelism is requested.

    Neither `sp_degree` nor `cluster.world_size` changes what such a cell computes. Raises ConfigError if the
    requested data parallelism needs more ranks than there are, and for an invalid `sp_degree`.
    """
    _number_unless_auto("sp_degree", raw["sp_degree"])
    replicate = values.whole_number("dp_replicate", raw["dp_replicate"])
    shard = _number_unless_auto("dp_shard", raw["dp_shard"]) or 1
    ranks = replicate * shard
    if ranks > (largest := _max_ranks(placement, machine)):
        raise ConfigError(_too_many_message("dp_replicate x dp_shard", ranks, largest, placement, machine))
    if ranks > placement.world_size and raw["cluster"]["world_size"] != "auto":
        raise ConfigError(
            f"dp_replicate x dp_shard = {ranks} ranks, but cluster.world_size={placement.world_size};"
            f" write cluster.world_size={ranks}"
        )
    return Degrees(1, replicate, shard)


def threads_per_rank(raw: Raw, machine: Machine, ranks: int) -> int:
    """Return the number of threads of a rank; `auto` divides the cores among the `ranks` ranks of a node."""
    if raw["threads_per_rank"] == "auto":
        return max(1, machine.cores // ranks)
    threads = values.whole_number("cluster.threads_per_rank", raw["threads_per_rank"])
    if threads > machine.cores:
        raise ConfigError(
            f"cluster.threads_per_rank={threads}: this process may use {machine.cores} cores; write"
            f" cluster.threads_per_rank={machine.cores}"
        )
    return threads


def memory_limit_gib(value: Any, device: str) -> float:
    """Return the memory limit of one rank in GiB; raise ConfigError for a bad value.

    A limit below MIN_CPU_LIMIT_GIB would end a CPU rank before it can report the reason.
    """
    key = "cluster.memory_limit_gib"
    limit_gib = values.positive(key, value, example="0.5")
    if device == "cpu" and limit_gib < MIN_CPU_LIMIT_GIB:
        raise ConfigError(
            f"{key}={value}: CPU ranks need at least {MIN_CPU_LIMIT_GIB} to start; write for example"
            f" {key}=0.1, or null for no limit"
        )
    return limit_gib


def _number_unless_auto(key: str, value: Any) -> int | None:
    return None if value == "auto" else values.whole_number(key, value)
