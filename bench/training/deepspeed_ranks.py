"""DeepSpeed takes over the process group that exists; nothing of it is started twice."""

from __future__ import annotations

import deepspeed
import deepspeed.comm

from bench.config import RunConfig
from bench.memory_limit import without_memory_limit


def join_deepspeed(cell: RunConfig) -> None:
    """Hand the default process group to DeepSpeed, which refuses to work without."""
    if not deepspeed.comm.is_initialized():
        # The first time it compiles its communication operators: a compiler would inherit the cell's limit.
        with without_memory_limit():
            deepspeed.init_distributed(
                dist_backend=cell.cluster.backend, auto_mpi_discovery=False, verbose=False
            )
