"""DeepSpeed on the process group that exists already."""

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


def join_deepspeed(cell: Cell) -> None:
    """Give DeepSpeed the device and the default process group; it does not work without."""
    if get_accelerator().device_name() != cell.cluster.device:
        # It was imported in the fork server, where DS_ACCELERATOR says cpu.
        set_accelerator(ACCELERATORS[cell.cluster.device]())
    if cell.cluster.device == "cpu":
        # Else DeepSpeed starts `numactl` in a new process for every bucket of gradients that it reduces.
        os.environ.setdefault("LOCAL_SIZE", str(cell.cluster.ranks_per_node))
    if not deepspeed.comm.is_initialized():
        # Else it compiles, half a minute long, an operator that only `inference_all_reduce` uses.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(dist_backend=cell.cluster.backend, auto_mpi_discovery=False, verbose=False)
    if cell.replay.rank not in (None, 0):
        # ZeRO-3 compares its order of parameters with rank 0's, which does not exist.
        utils.get_lst_from_rank0 = lambda own: own
        utils.assert_lst_len_same_as_other_ranks = lambda _: None
