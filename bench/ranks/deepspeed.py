"""Start of DeepSpeed on an existing process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import deepspeed
import deepspeed.comm
import deepspeed.ops
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime.zero import utils

from bench.config import Cell

ACCELERATORS: Mapping[str, Callable[[], object]] = {"cpu": CPU_Accelerator, "cuda": CUDA_Accelerator}
"""DeepSpeed's accelerator class for each type of device."""


def join_deepspeed(cell: Cell) -> None:
    """Initialize DeepSpeed with the rank's device and the default process group."""
    if get_accelerator().device_name() != cell.cluster.device:
        # DeepSpeed was imported in the fork server, which sets DS_ACCELERATOR=cpu.
        set_accelerator(ACCELERATORS[cell.cluster.device]())
    if cell.cluster.device == "cpu":
        # Without LOCAL_SIZE, DeepSpeed starts a `numactl` process for each bucket of gradients.
        os.environ.setdefault("LOCAL_SIZE", str(cell.cluster.ranks_per_node))
    if not deepspeed.comm.is_initialized():
        # Otherwise DeepSpeed spends half a minute compiling an operator for `inference_all_reduce` only.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(dist_backend=cell.cluster.backend, auto_mpi_discovery=False, verbose=False)
    if cell.replay.rank not in (None, 0):
        # ZeRO-3 compares its order of parameters with that of rank 0. In this replay rank 0 does not run.
        utils.get_lst_from_rank0 = lambda own: own
        utils.assert_lst_len_same_as_other_ranks = lambda _: None
