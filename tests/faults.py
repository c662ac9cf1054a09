"""What can go wrong in a rank, as entries the launcher runs in place of `run_cell`."""

import os
import signal
import time

import bench.training.trainers
from bench.worker import run_cell


def raise_in_rank_1(job, log):
    if job.rank == 1:
        with log.during("build"):
            raise ValueError("a rank that raises")
    return run_cell(job, log)


def kill_rank_1(job, log):
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_cell(job, log)


def segfault_in_rank_1(job, log):
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return run_cell(job, log)


def sleep_in_rank_1(job, log):
    if job.rank == 1:
        time.sleep(3600)
    return run_cell(job, log)


def leave_rank_1(job, log):
    if job.rank == 1:
        os._exit(0)
    return run_cell(job, log)


def run_out_of_memory_in_rank_1(job, log):
    if job.rank == 1:
        bytearray(2**60)
    return run_cell(job, log)


def divide_by_sp_degree(job, log):
    """The classic mistake: a loss averaged once more over the ranks that share a sequence."""
    right = bench.training.trainers.backward_loss
    bench.training.trainers.backward_loss = lambda *loss: right(*loss) / job.cell.sp_degree
    return run_cell(job, log)


def forget_to_shard_rank_1(job, log):
    """A silent fault of real trainers: a rank trains on its neighbour's tokens again."""
    if job.rank == 1:
        layout = type(job.cell)  # the cell is frozen: the strategy's slices are what goes wrong
        assert layout is not None
        from bench.attention import strategy

        strategy.Strategy.slices = lambda self, seq_len: (slice(0, seq_len // self.cell.sp_degree),)
    return run_cell(job, log)
