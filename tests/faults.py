"""What can go wrong in a rank, as entries the launcher runs in place of `run_cell`."""

import os
import signal
import time
from dataclasses import replace

import bench.training.trainers
from bench.attention.strategy import Strategy
from bench.strategies import runnable
from bench.strategies.local.attention import LocalAttention
from bench.strategies.ring.attention import Ring
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
        Strategy.slices = lambda self, seq_len: (slice(0, seq_len // self.cell.sp_degree),)
    return run_cell(job, log)


def attend_locally(job, log):
    """A strategy that the configuration accepts and nobody applies."""
    runnable(job.cell.strategy).attention = LocalAttention.attention
    return run_cell(job, log)


def drop_a_ring_step(job, log):
    """One rank's keys are never looked at, and never sent."""
    sources = Ring.sources
    Ring.sources = lambda self: sources(self)[:-1]
    return run_cell(job, log)


def contiguous_positions_with_zigzag(job, log):
    """Tokens in the order of one layout, positions in that of another."""
    shard = Strategy.shard

    def misplaced(self, batch):
        right = shard(self, batch)
        size = right.input_ids.shape[1]
        start = self.groups.sequence_rank * size
        return replace(right, position_ids=batch.position_ids[:, start : start + size])

    Strategy.shard = misplaced
    return run_cell(job, log)
