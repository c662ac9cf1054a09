"""One rank's life: join, build, run the passes, report, leave.

A rank ends by `os._exit`, in success and failure. Destroying gloo groups hangs now and then, and leaving
through interpreter shutdown after DeepSpeed aborts now and then.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import to_builtins
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bench.common.cpu_arithmetic import cpu_arithmetic
from bench.config import Cell
from bench.measure.mistakes import mistaken
from bench.measure.rank_pass import Measurement
from bench.measure.workloads import workload_code
from bench.measure.workloads.workload import Rank, use_libraries_once
from bench.ranks.device import (
    NvtxRanges,
    bind_near_gpu,
    claim_device,
    finish_together,
    make_first_collective,
    nccl_version,
    prepare_shared_gpu,
    set_allocator,
)
from bench.ranks.groups import deadline, make_groups, outwait_the_launcher
from bench.ranks.log import JOIN, RankLog, RankStage, RankStateFile, place_path
from bench.ranks.memory_limit import set_memory_limit
from bench.ranks.products import use_wide_products
from bench.run.node.failure import describe_failure
from bench.run.node.job import RankEntry, RankJob, StoreAddress, failure_path, log_path, report_path
from bench.run.node.lifeline import die_with_parent
from bench.run.node.ranks import Failing, lost_a_peer
from bench.run.node.stacks import STACK_SIGNAL
from bench.strategies import STRATEGIES, runnable
from bench.training.models import TORCH_DTYPES

OTHER_LAUNCHERS = (
    "GROUP_", "LOCAL_WORLD_", "MASTER_", "MPI_", "MV2_", "OMPI_", "PMI", "ROLE_", "SLURM_",
    "TORCHELASTIC_",
)  # fmt: skip
"""How the variables begin that mpirun, srun or a torchrun around the sweep leave behind."""


def live(job: RankJob, tell: Callable[[RankStage | Failing], None], entry: RankEntry) -> None:
    """Run a rank to its end; never returns. Its report or its failure is on the disk by then."""
    log = RankLog(tell, on_error=lambda error: _fail(job, log, tell, error))
    try:
        _prepare(job)
        products = use_wide_products() if job.cell.cluster.device == "cpu" else None
        if job.scratch is not None:
            # From now on the launcher can tell where this rank is, and ask for its stack. A disk without room
            # for its place: the rank is no worse for that.
            with suppress(OSError):
                log.keep(RankStateFile(place_path(job.scratch, job.rank)).note)
        report = entry(job, log)
        _write(report_path(job.folder, job.rank), {**report, "phases_s": log.phases_s})
        del products  # held until here: torch's own come back when it is gone
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever ends a rank becomes its record
        _fail(job, log, tell, error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_cell(job: RankJob, log: RankLog) -> dict[str, Any]:
    """Join, build, and run the cell's passes: this rank's part of every section of the record."""
    cell = job.cell
    measurement = Measurement(
        cell.measure,
        torch.device(cell.cluster.device),
        log,
        job.folder,
        known=job.known,
    )
    if cell.measure.nvtx:
        log.keep(NvtxRanges().enter)
    with log.during(JOIN):
        device = join(job)
        if cell.replay.rank is None:
            log.begin("first all_reduce")
            make_first_collective(device)
        groups = make_groups(cell)
    with log.during("strategy"):  # of which a package may be imported here
        code = mistaken(cell.inject_fault).strategy(runnable(cell.strategy))
        strategy = code(cell, groups, STRATEGIES[cell.strategy])
    if cell.cluster.memory_limit_gib is not None:
        with log.during("limit"):
            if device.type == "cpu":
                use_libraries_once(cell, groups, device)
            log.limit_base_bytes = set_memory_limit(cell.cluster.memory_limit_gib, device)
    with strategy.install() as wiring:
        with log.during("build"), measurement.building():
            log.step.enter("load")
            workload = workload_code(cell.workload.name)(Rank(strategy, wiring, device, log.step, log.begin))
            outwait_the_launcher(cell)
        workload.run(measurement.steps(workload))
        report = {**measurement.report(), "software": _software(cell, device)}
    with log.during("finish"):
        finish_together(device, cell.running_ranks)
    return report


def _software(cell: Cell, device: torch.device) -> dict[str, str]:
    """`nccl_version` on a GPU; on a CPU `cpu_products`, the dtype of products in linear layers and kernels.

    torch's own `sdpa`, which training stacks run, always computes in the cell's dtype.
    """
    if device.type == "cuda":
        return nccl_version(device) if cell.replay.rank is None else {}
    return {"cpu_products": str(cpu_arithmetic(TORCH_DTYPES[cell.dtype])).removeprefix("torch.")}


def _fail(
    job: RankJob, log: RankLog, tell: Callable[[RankStage | Failing], None], error: BaseException
) -> None:
    """Write the failure and say so at once; only the first of a rank's errors counts."""
    path = failure_path(job.folder, job.rank)
    if not path.exists():
        failure = describe_failure(error, log, job.cell.cluster)
        _write(path, to_builtins(failure))
        tell(Failing(job.rank, lost_a_peer(failure)))


def _prepare(job: RankJob) -> None:
    """Prepare the process: exit with the launcher, write output to a log, dump stacks on a signal, set the
    number of threads.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()  # torchrun has done so already
    die_with_parent()
    log = os.open(log_path(job.folder, job.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)
    # What a package will change one day it would say on every call, until nothing else is left of the log.
    # "once" does not help: packages touch the filters in every step, which makes Python forget.
    warnings.simplefilter("ignore", FutureWarning)
    if job.cell.env:
        os.environ.update(dict(job.cell.env))
        set_allocator(dict(job.cell.env))
    if job.rendezvous is not None:
        # transformers, accelerate and DeepSpeed look for torchrun's variables, and trip over any other's.
        for name in [name for name in os.environ if name.startswith(OTHER_LAUNCHERS)]:
            del os.environ[name]
        ranks = {
            "RANK": job.rank,
            "LOCAL_RANK": job.local_rank,
            "WORLD_SIZE": job.cell.cluster.world_size,
            "LOCAL_WORLD_SIZE": job.local_world_size,
        }
        os.environ.update({name: str(value) for name, value in ranks.items()})
    if job.interface is not None:
        # Else gloo takes the one of the address that the host's name resolves to, often the loopback's.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    if job.cell.cluster.ranks_per_gpu > 1:
        prepare_shared_gpu(job.cell.cluster)
    torch.set_num_threads(job.cell.cluster.threads_per_rank)


def join(job: RankJob) -> torch.device:
    """Claim this rank's device and join the other ranks, or in a replay be the only one that exists."""
    cluster = job.cell.cluster
    device = claim_device(cluster)
    if cluster.numa_binding is not None:
        bind_near_gpu(cluster.numa_binding, device)
    if job.cell.replay.rank is not None:
        from bench.ranks.played_group import join_alone

        join_alone(job.rank, cluster.world_size, device, deadline(job.cell))
        return device
    dist.init_process_group(
        cluster.backend,
        timeout=deadline(job.cell),
        device_id=device if device.type == "cuda" else None,
        **_rendezvous(job),
    )
    return device


def _rendezvous(job: RankJob) -> dict[str, Any]:
    """How torch is told where ranks meet."""
    if job.rendezvous is None:
        return {"init_method": "env://"}
    place = {"rank": job.rank, "world_size": job.cell.cluster.world_size}
    if isinstance(job.rendezvous, StoreAddress):
        address = job.rendezvous
        shared = TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=deadline(job.cell),
        )
        return {"store": PrefixStore(address.prefix, shared), **place}
    # A file needs no port, so no second sweep or leftover can hold it.
    return {"init_method": f"file://{job.rendezvous}", **place}


def _write(path: Path, content: dict[str, Any]) -> None:
    """One JSON file per rank, whole or not there at all."""
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def main() -> None:
    """Run one rank of a cell that torchrun started: `-m bench.run.node.worker CELL.json FOLDER`."""
    cell = Cell.from_flat(json.loads(Path(sys.argv[1]).read_text()))
    rank = int(os.environ["RANK"])
    job = RankJob(cell, rank, Path(sys.argv[2]), scratch=None, rendezvous=None)
    live(job, lambda _: None, run_cell)


if __name__ == "__main__":
    main()
