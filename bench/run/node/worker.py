"""Run one rank: join the process group, build the workload, run the passes, write the report, exit.

A rank always exits by `os._exit`, because destroying gloo groups sometimes hangs, and the interpreter's
shutdown after DeepSpeed sometimes aborts.
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
from bench.measure.mistakes import load_mistake
from bench.measure.rank_pass import Measurement
from bench.measure.workloads import load_workload_class
from bench.measure.workloads.workload import WorkloadRank, use_libraries_once
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
from bench.ranks.groups import collective_timeout, extend_group_timeouts, make_groups
from bench.ranks.log import JOIN, RankLog, RankStage, RankStateFile, rank_state_path
from bench.ranks.memory_limit import set_memory_limit
from bench.ranks.products import use_wide_products
from bench.run.node.failure import describe_failure
from bench.run.node.job import RankEntry, RankJob, StoreAddress, failure_path, log_path, report_path
from bench.run.node.lifeline import die_with_parent
from bench.run.node.ranks import RankFailed, is_lost_peer_failure
from bench.run.node.stacks import STACK_SIGNAL
from bench.strategies import STRATEGIES, load_strategy_class
from bench.training.models import TORCH_DTYPES

OTHER_LAUNCHER_PREFIXES = (
    "GROUP_", "LOCAL_WORLD_", "MASTER_", "MPI_", "MV2_", "OMPI_", "PMI", "ROLE_", "SLURM_",
    "TORCHELASTIC_",
)  # fmt: skip
"""Prefixes of environment variables that torchrun, mpirun or srun may have set, if it started the sweep."""


def run_rank(job: RankJob, send: Callable[[RankStage | RankFailed], None], entry: RankEntry) -> None:
    """Run a rank, write its report or its failure file, and exit the process; never returns.

    `send` passes stages and failures to the launcher.
    """
    log = RankLog(send, on_error=lambda error: _record_failure(job, log, send, error))
    try:
        _prepare_process(job)
        products = use_wide_products() if job.cell.cluster.device == "cpu" else None
        if job.scratch is not None:
            # From now on the launcher can read this rank's state and ask for its stack. A full disk is no
            # error, as the rank also works without a state file.
            with suppress(OSError):
                log.add_listener(RankStateFile(rank_state_path(job.scratch, job.rank)).write)
        report = entry(job, log)
        _write(report_path(job.folder, job.rank), {**report, "phases_s": log.phases_s})
        del products  # restores torch's own matrix products
        code = 0
    except BaseException as error:  # noqa: BLE001  any error that ends a rank goes into its record
        _record_failure(job, log, send, error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_cell(job: RankJob, log: RankLog) -> dict[str, Any]:
    """Run the passes of a cell on this rank and return its part of every section of the record."""
    cell = job.cell
    measurement = Measurement(
        cell.measure,
        torch.device(cell.cluster.device),
        log,
        job.folder,
        skipped=job.skipped_passes,
    )
    if cell.measure.nvtx:
        log.add_listener(NvtxRanges().enter)
    with log.run_phase(JOIN):
        device = join(job)
        if cell.replay.rank is None:
            log.begin_part("first all_reduce")
            make_first_collective(device)
        groups = make_groups(cell)
    with log.run_phase("strategy"):  # may import the strategy's package
        strategy_class = load_mistake(cell.inject_fault).strategy(load_strategy_class(cell.strategy))
        strategy = strategy_class(cell, groups, STRATEGIES[cell.strategy])
    if cell.cluster.memory_limit_gib is not None:
        with log.run_phase("limit"):
            if device.type == "cpu":
                use_libraries_once(cell, groups, device)
            log.limit_base_bytes = set_memory_limit(cell.cluster.memory_limit_gib, device)
    with strategy.install() as wiring:
        with log.run_phase("build"), measurement.around_building():
            log.step.enter("load")
            workload = load_workload_class(cell.workload.name)(
                WorkloadRank(strategy, wiring, device, log.step, log.begin_part)
            )
            extend_group_timeouts(cell)
        workload.run(measurement.steps(workload))
        report = {**measurement.report(), "software": _software(cell, device)}
    with log.run_phase("finish"):
        finish_together(device, cell.running_ranks)
    return report


def _software(cell: Cell, device: torch.device) -> dict[str, str]:
    """Return versions and settings of software that the launcher cannot know, as it imports no torch.

    A GPU has `nccl_version`. A CPU has `cpu_products`, the dtype in which linear layers and kernels multiply;
    torch's `sdpa`, which training stacks run, always multiplies in the cell's dtype.
    """
    if device.type == "cuda":
        return nccl_version(device) if cell.replay.rank is None else {}
    return {"cpu_products": str(cpu_arithmetic(TORCH_DTYPES[cell.dtype])).removeprefix("torch.")}


def _record_failure(
    job: RankJob, log: RankLog, send: Callable[[RankStage | RankFailed], None], error: BaseException
) -> None:
    """Write the failure file and notify the launcher at once; does nothing after a rank's first error."""
    path = failure_path(job.folder, job.rank)
    if not path.exists():
        failure = describe_failure(error, log, job.cell.cluster)
        _write(path, to_builtins(failure))
        send(RankFailed(job.rank, is_lost_peer_failure(failure)))


def _prepare_process(job: RankJob) -> None:
    """Set up signals, log, environment variables and the number of threads of this rank process.

    The process ends with its parent, writes its output to the rank's log, and dumps its stacks there on
    STACK_SIGNAL.
    """
    if os.getsid(0) != os.getpid():  # equal under torchrun, which starts a session for each rank
        os.setsid()
    die_with_parent()
    log = os.open(log_path(job.folder, job.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)
    # Packages repeat FutureWarnings on every call, until the log's end has nothing else. "once" does not
    # help, as packages change the filters in every step and Python then forgets what it has shown.
    warnings.simplefilter("ignore", FutureWarning)
    if job.cell.env:
        os.environ.update(dict(job.cell.env))
        set_allocator(dict(job.cell.env))
    if job.rendezvous is not None:
        # transformers, accelerate and DeepSpeed read torchrun's variables and fail on another launcher's.
        for name in [name for name in os.environ if name.startswith(OTHER_LAUNCHER_PREFIXES)]:
            del os.environ[name]
        variables = {
            "RANK": job.rank,
            "LOCAL_RANK": job.local_rank,
            "WORLD_SIZE": job.cell.cluster.world_size,
            "LOCAL_WORLD_SIZE": job.local_world_size,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
    if job.interface is not None:
        # By default gloo takes the interface of the host name's address, which is often the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    if job.cell.cluster.ranks_per_gpu > 1:
        prepare_shared_gpu(job.cell.cluster)
    torch.set_num_threads(job.cell.cluster.threads_per_rank)


def join(job: RankJob) -> torch.device:
    """Claim the device of this rank, join the process group and return the device.

    In a replay this rank is the only real one of its group.
    """
    cluster = job.cell.cluster
    device = claim_device(cluster)
    if cluster.numa_binding is not None:
        bind_near_gpu(cluster.numa_binding, device)
    if job.cell.replay.rank is not None:
        from bench.ranks.replay_group import join_replay_group

        join_replay_group(job.rank, cluster.world_size, device, collective_timeout(job.cell))
        return device
    dist.init_process_group(
        cluster.backend,
        timeout=collective_timeout(job.cell),
        device_id=device if device.type == "cuda" else None,
        **_rendezvous_options(job),
    )
    return device


def _rendezvous_options(job: RankJob) -> dict[str, Any]:
    """Return the arguments of `init_process_group` that say through which file or store the ranks connect."""
    if job.rendezvous is None:
        return {"init_method": "env://"}
    rank = {"rank": job.rank, "world_size": job.cell.cluster.world_size}
    if isinstance(job.rendezvous, StoreAddress):
        address = job.rendezvous
        store = TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=collective_timeout(job.cell),
        )
        return {"store": PrefixStore(address.prefix, store), **rank}
    # A file needs no port that a second sweep or a leftover process may have taken.
    return {"init_method": f"file://{job.rendezvous}", **rank}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file so that it is complete or does not exist."""
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def main() -> None:
    """Run one rank of a cell under torchrun: `torchrun -m bench.run.node.worker CELL.json FOLDER`."""
    cell = Cell.from_flat(json.loads(Path(sys.argv[1]).read_text()))
    rank = int(os.environ["RANK"])
    job = RankJob(cell, rank, Path(sys.argv[2]), scratch=None, rendezvous=None)
    run_rank(job, lambda _: None, run_cell)


if __name__ == "__main__":
    main()
