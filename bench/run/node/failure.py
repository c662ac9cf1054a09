"""Describe the error that ended a rank, while the frames of its traceback still hold their tensors."""

from __future__ import annotations

import time
import traceback

import torch

from bench.common.labels import GIB
from bench.config import ClusterConfig
from bench.measure.memory.live_blocks import largest_block_classes
from bench.ranks.log import RankLog
from bench.ranks.memory_limit import lift_memory_limit, used_limit_bytes
from bench.ranks.out_of_memory import requested_bytes, root_cause
from bench.record.record import OutOfMemory
from bench.run.node.ranks import RankFailure


def describe_failure(error: BaseException, log: RankLog, cluster: ClusterConfig) -> RankFailure:
    """Return the content of a rank's failure file.

    Lifts the cell's memory limit first, as the description itself needs memory.
    """
    allocated_bytes = _allocated_bytes(cluster)
    if log.limit_base_bytes is not None and cluster.device == "cpu":
        lift_memory_limit()
    cause, resource = root_cause(error, limited=log.limit_base_bytes is not None)
    return RankFailure(
        phase=log.phase,
        step_phase=log.step.name,
        kind=type(cause).__name__,
        message=": ".join(filter(None, (resource.advice, str(cause)))),
        traceback="".join(traceback.format_exception(error)),
        failed_at_s=time.monotonic(),
        out_of_memory=None
        if resource.memory is None
        else _out_of_memory(cause, resource.memory, allocated_bytes, cluster),
    )


def _out_of_memory(
    cause: BaseException, memory: str, allocated_bytes: int | None, cluster: ClusterConfig
) -> OutOfMemory:
    limit_gib = cluster.memory_limit_gib
    return OutOfMemory(
        memory=memory,
        requested_bytes=requested_bytes(str(cause)),
        limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
        allocated_bytes=allocated_bytes if memory == "device" or cluster.device == "cpu" else None,
        largest=largest_block_classes(cluster.device),
    )


def _allocated_bytes(cluster: ClusterConfig) -> int | None:
    """Return the bytes that the rank had allocated when it failed.

    On a GPU they are all of its tensors, on the CPU the bytes that the memory limit counts. Return None if
    CUDA was not started, or on the CPU without a memory limit.
    """
    if cluster.device == "cuda":
        return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None
    return None if cluster.memory_limit_gib is None else used_limit_bytes(cluster.memory_limit_gib)
