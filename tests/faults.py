"""What can go wrong in a rank, as entries the launcher runs in place of `run_cell`."""

import os
import time
from functools import partial

import torch
import torch.distributed as dist

from bench.node import worker
from bench.node.worker import join, run_cell
from bench.passes.objective import rank as objective
from bench.passes.timing.clock import StepClock
from bench.training import models
from tests.benchmarks.overhead import compare
from tests.fault_classes import attention, tampering, tokens
from tests.fault_classes.tampering import change_the_model, tampered, wrap

divide_by_sp_degree = partial(tampered, tokens.divide_by_sp_degree)
withhold_the_documents = partial(tampered, attention.forget_documents)


def raise_in_rank_1(job, log):
    if job.rank == 1:
        with log.during("build"):
            raise ValueError("a rank that raises")
    return run_cell(job, log)


def sleep_in_rank_1(job, log):
    if job.rank == 1:
        time.sleep(3600)
    return run_cell(job, log)


def never_connect(job, log):
    """NCCL between boards whose peer-to-peer is broken: rank 1 never comes to the first all-reduce."""
    if job.rank == 1:
        worker.make_first_collective = lambda _: sleep_for_an_hour()
    return run_cell(job, log)


def run_out_of_memory_in_rank_1(job, log):
    if job.rank == 1:
        bytearray(2**60)
    return run_cell(job, log)


def run_out_of_memory_in_rank_1_and_hang_up_first(job, log):
    """The others lose their connection long before the cause is told: longer than `short_grace`."""
    join(job)
    dist.barrier()
    if job.rank == 1:
        try:
            run_out_of_memory_in_rank_1(job, log)
        finally:
            dist.destroy_process_group()
            time.sleep(2.5)
    dist.all_reduce(torch.ones(2**20))
    return {}


def run_out_of_memory_and_fail_in_cleanup(job, log):
    """A library's own cleanup trips over the failed allocation."""
    if job.rank == 1:
        try:
            run_out_of_memory_in_rank_1(job, log)
        except MemoryError as error:
            raise RuntimeError("cannot close what was never opened") from error
    return run_cell(job, log)


def run_out_of_memory_and_never_leave(job, log):
    """The error is on its way out of the rank's phase, and something further out never comes back."""
    if job.rank == 1:
        try:
            with log.during("build"):
                run_out_of_memory_in_rank_1(job, log)
        finally:
            time.sleep(3600)
    return run_cell(job, log)


def abort_like_a_limit_in_rank_1(job, log):
    """What glibc says and does where a thread's own data finds no room."""
    if job.rank == 1:
        os.write(2, b"cannot allocate memory for thread-local data: ABORT\n")
        os._exit(127)
    return run_cell(job, log)


def have_no_room(job, log):
    """A machine on which a second model does not fit."""
    objective.CPU_ROOM_BYTES = 0
    return run_cell(job, log)


def have_room_for_three_layers(job, log, fault=tampering.nothing):
    """A machine on which three layers have room, and neither the others nor what is outside of layers."""
    *_, fewest = objective.coverages(job.cell)
    tokens = objective.objective_tokens(job.cell.padded_len, job.cell.sp_degree)
    objective.CPU_ROOM_BYTES = objective.needed_bytes(job.cell, tokens, fewest)
    objective.CPU_ROOM_BYTES += objective.gradient_bytes(job.cell, fewest)
    return tampering.tampered(fault, job, log)


def choose_frequencies_by_own_length(job, log):
    """As transformers does: by the largest position that a rank is given."""
    models.BY_LENGTH = ()
    return run_cell(job, log)


def slow_down_timed_steps(job, log, **rounds):
    """The marks of a timed step take time, and wait for the other ranks."""

    def slow_mark(plain, self):
        time.sleep(0.02)
        dist.barrier()
        plain(self)

    wrap(StepClock, "mark", slow_mark)
    return compare(job, log, **rounds)


def sleep_for_an_hour():
    time.sleep(3600)


def enlarge_gradients_in_the_middle_layer(job):
    """Make the gradient of its MLP's output a tenth too large."""

    def forward(plain, hidden):
        out = plain(hidden)
        out.register_hook(lambda gradient: 1.1 * gradient)
        return out

    def change(model):
        layers = model.model.model.layers
        wrap(layers[len(layers) // 2].mlp, "forward", forward)

    change_the_model(change)
