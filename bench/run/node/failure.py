"""What a rank writes about the error that ended it, while the error's frames still hold their tensors."""

from __future__ import annotations

import time
import traceback

import torch

from bench.common.labels import GIB
from bench.config import ClusterConfig
from bench.measure.memory.live_blocks import largest_classes
from bench.ranks.log import RankLog
from bench.ranks.memory_limit import held_bytes, lift_memory_limit
from bench.ranks.out_of_memory import requested_bytes, root_cause
from bench.record.record import OutOfMemory
from bench.run.node.ranks import RankFailure


def describe_failure(error: BaseException, log: RankLog, cluster: ClusterConfig) -> RankFailure:
    """Return the content of a rank's failure file; lifts the cell's memory limit first."""
    held = _held_bytes(cluster)
    if log.limit_base_bytes is not None and cluster.device == "cpu":
        lift_memory_limit()
    cause, memory = root_cause(error, limited=log.limit_base_bytes is not None)
    return RankFailure(
        phase=log.phase,
        step_phase=log.step.name,
        kind=type(cause).__name__,
        message=str(cause),
        traceback="".join(traceback.format_exception(error)),
        failed_at_s=time.monotonic(),
        out_of_memory=None if memory is None else _out_of_memory(cause, memory, held, cluster),
    )


def _out_of_memory(
    cause: BaseException, memory: str, held: int | None, cluster: ClusterConfig
) -> OutOfMemory:
    limit_gib = cluster.memory_limit_gib
    return OutOfMemory(
        memory=memory,
        requested_bytes=requested_bytes(str(cause)),
        limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
        allocated_bytes=held,
        largest=largest_classes(cluster.device),
    )


def _held_bytes(cluster: ClusterConfig) -> int | None:
    """Bytes that the rank held when it failed: on a GPU all, on the CPU those that its limit counts.

    None on the CPU where no limit held, as in a check.
    """
    if cluster.device == "cuda":
        return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None
    return None if cluster.memory_limit_gib is None else held_bytes(cluster.memory_limit_gib)
