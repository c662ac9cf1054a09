"""Faults of a rank, as entry points that the launcher runs in place of `run_cell`.

Faults under `in_a_step` happen in the forward pass of a rank's first full-length step, while the other
ranks are in a collective.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.profiler import profile

from bench.measure.objective import rank as objective
from bench.measure.telemetry import rank as telemetry_rank
from bench.measure.telemetry.rank import open_nvml
from bench.measure.timing.clock import StepClock
from bench.measure.trace import tracer
from bench.run.node import worker
from bench.run.node.worker import join, run_cell
from bench.training import models
from bench.training.trainers.native import NativeTrainer
from tests.benchmarks.overhead import compare
from tests.support.cuda.nvml_driver import Driver
from tests.support.faults.classes import tampering, tokens
from tests.support.faults.classes.tampering import change_the_model, run_with_fault, wrap

STRUCK = "struck_{rank}"
"""File with the time at which a rank's fault began, by the clock that all processes of a machine share."""
ON_GPU = "GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is free."


divide_by_sp_degree = partial(run_with_fault, tokens.divide_by_sp_degree)


def raise_in_rank_1(job, log):
    if job.rank == 1:
        with log.run_phase("build"):
            raise ValueError("a rank that raises")
    return run_cell(job, log)


def sleep_in_rank_1(job, log):
    if job.rank == 1:
        time.sleep(3600)
    return run_cell(job, log)


def never_connect(job, log):
    """Keep rank 1 from the first all-reduce, like NCCL between boards whose peer-to-peer access is broken."""
    if job.rank == 1:
        worker.make_first_collective = lambda _: sleep_for_an_hour()
    return run_cell(job, log)


def run_out_of_memory_in_rank_1(job, log):
    if job.rank == 1:
        bytearray(2**60)
    return run_cell(job, log)


def run_out_of_memory_in_rank_1_and_hang_up_first(job, log):
    """Close rank 1's connection longer than `short_grace` before it reports the cause."""
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
    """Raise another error in a library's cleanup after the failed allocation."""
    if job.rank == 1:
        try:
            run_out_of_memory_in_rank_1(job, log)
        except MemoryError as error:
            raise RuntimeError("cannot close what was never opened") from error
    return run_cell(job, log)


def run_out_of_memory_and_never_leave(job, log):
    """Raise an error out of the rank's phase, and block in an outer `finally` forever."""
    if job.rank == 1:
        try:
            with log.run_phase("build"):
                run_out_of_memory_in_rank_1(job, log)
        finally:
            time.sleep(3600)
    return run_cell(job, log)


def abort_like_a_limit_in_rank_1(job, log):
    """Print and exit as glibc does if it cannot allocate memory for thread-local data."""
    if job.rank == 1:
        os.write(2, b"cannot allocate memory for thread-local data: ABORT\n")
        os._exit(127)
    return run_cell(job, log)


def have_no_room(job, log):
    """Run a cell on a machine on which a second model does not fit."""
    objective.CPU_ROOM_BYTES = 0
    return run_cell(job, log)


def have_room_for_three_layers(job, log, fault=tampering.no_fault):
    """Run a cell on a machine on which only the gradients of three layers fit."""
    *_, fewest = objective.coverages(job.cell)
    tokens = objective.objective_tokens(job.cell.padded_len, job.cell.sp_degree)
    objective.CPU_ROOM_BYTES = objective.needed_bytes(job.cell, tokens, fewest)
    objective.CPU_ROOM_BYTES += objective.gradient_bytes(job.cell, fewest)
    return tampering.run_with_fault(fault, job, log)


def choose_frequencies_by_own_length(job, log):
    """Choose rotary frequencies by the largest position that a rank is given, as transformers does."""
    models.LENGTH_DEPENDENT_ROPE = ()
    return run_cell(job, log)


def slow_down_timed_steps(job, log, **rounds):
    """Make each mark of a timed step take time and wait for the other ranks."""

    def slow_mark(plain, self):
        time.sleep(0.02)
        dist.barrier()
        plain(self)

    wrap(StepClock, "mark", slow_mark)
    return compare(job, log, **rounds)


def sleep_for_an_hour():
    time.sleep(3600)


def enlarge_gradients_in_the_middle_layer(job):
    """Make the gradient of the MLP's output in the middle layer a tenth too large."""

    def forward(plain, hidden):
        out = plain(hidden)
        out.register_hook(lambda gradient: 1.1 * gradient)
        return out

    def change(model):
        layers = model.model.model.layers
        wrap(layers[len(layers) // 2].mlp, "forward", forward)

    change_the_model(change)


def record_start(job):
    """Write the time and this process's ID to a file when the fault begins for the first time."""
    path = job.folder / STRUCK.format(rank=job.rank)
    if not path.exists():
        path.write_text(f"{time.monotonic()} {os.getpid()}")


def in_a_step(act, ranks, job, log):
    """Run `act`, which mostly never returns, in the forward pass of a full-length step on these ranks."""
    accumulate = NativeTrainer.accumulate

    def faulty(self, number, seq_len):
        if job.rank in ranks and seq_len == job.cell.seq_len:
            self.phase.enter("forward")
            record_start(job)
            act()
        return accumulate(self, number, seq_len)

    NativeTrainer.accumulate = faulty
    return run_cell(job, log)


def from_the_start(entry, job, log):
    """Run `entry`, whose fault is present on all ranks from their start."""
    record_start(job)
    return entry(job, log)


def ask_for_too_much():
    torch.empty(2**60, dtype=torch.uint8)


def ask_for_too_much_and_clean_up():
    try:
        ask_for_too_much()
    finally:
        time.sleep(1.5)


def run_out_of_device_memory():
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. {ON_GPU}")


def speak_of_memory():
    raise RuntimeError("tensors must be in contiguous memory format")


def reduce(size):
    """Take part in an all-reduce with a tensor of another size than the other ranks'."""
    dist.all_reduce(torch.ones(size))


def receive(signal_number):
    os.kill(os.getpid(), signal_number)


def ignore_sigterm_with_a_child():
    """Ignore SIGTERM and hang, with a child that inherits the rank's output and would keep its pipes open."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", code])
    sleep_for_an_hour()


def interrupt_the_launcher():
    """Send SIGINT twice, like a user who presses Ctrl-C twice."""
    for _ in range(2):
        os.kill(parent_process().pid, signal.SIGINT)
        time.sleep(0.05)
    sleep_for_an_hour()


def set_the_wall_clock_back(job, log):
    """Make `time.time` go back by an hour at every call."""
    calls = iter(range(10**9))
    time.time = lambda: 1e9 - 3600.0 * next(calls)
    return run_cell(job, log)


def with_nvml(driver, job, log):
    """Run a cell with a stand-in for the NVML driver, sampled often enough for a short window."""
    stand_in = Driver(**driver)
    stand_in.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    telemetry_rank.open_nvml = lambda *_, **__: open_nvml(torch.device("cuda", 0), stand_in)
    telemetry_rank.PERIOD_S = 1e-3
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="1234")
    return run_cell(job, log)


class DeadProfiler(profile):
    """A profiler that fails to start."""

    def start(self):
        raise RuntimeError("kineto is not there")


class TornTrace(profile):
    """A profiler that writes half of its trace file."""

    def export_chrome_trace(self, path):
        super().export_chrome_trace(path)
        os.truncate(path, Path(path).stat().st_size // 2)


def with_profiler(profiler, job, log):
    """Run a cell with this profiler on rank 1; rank 0 keeps torch's."""
    if job.rank == 1:
        tracer.profile = profiler
    return run_cell(job, log)


def first_fault(folder):
    """Return the time of the first fault of any rank in this folder, and the process IDs of these ranks."""
    notes = [path.read_text().split() for path in Path(folder).rglob(STRUCK.format(rank="*"))]
    return min((float(at_s) for at_s, _ in notes), default=None), [int(pid) for _, pid in notes]


def without_parity(entry, job, log):
    """Run `entry` without the parity pass, in which nothing happens and which takes a third of the time."""
    return (entry or run_cell)(replace(job, skipped_passes=job.skipped_passes | {"parity"}), log)
