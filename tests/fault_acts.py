"""What happens to a rank in a fault of the matrix: entries that the launcher runs in place of `run_cell`.

Most happen in the forward pass of a rank's first step at full length, while the others are in a collective.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.profiler import profile

from bench.node.worker import run_cell
from bench.passes.telemetry import rank as telemetry_rank
from bench.passes.telemetry.rank import open_nvml
from bench.passes.trace import trace
from bench.training.trainers.native import NativeTrainer
from tests.faults import sleep_for_an_hour
from tests.nvml_driver import Driver

STRUCK = "struck_{rank}"
"""A rank's own note of when its fault began, by the clock that all processes of a machine share."""
ON_GPU = "GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is free."


def note(job):
    """Of the first time only."""
    path = job.folder / STRUCK.format(rank=job.rank)
    if not path.exists():
        path.write_text(f"{time.monotonic()} {os.getpid()}")


def in_a_step(act, ranks, job, log):
    """These ranks do this in place of the rest of their first step at full length."""
    accumulate = NativeTrainer.accumulate

    def faulty(self, number, seq_len):
        if job.rank in ranks and seq_len == job.cell.seq_len:
            self.phase.enter("forward")
            note(job)
            act()
        return accumulate(self, number, seq_len)

    NativeTrainer.accumulate = faulty
    return run_cell(job, log)


def from_the_start(entry, job, log):
    """What is wrong with all ranks from their start."""
    note(job)
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
    """What the others reduce has another size."""
    dist.all_reduce(torch.ones(size))


def receive(caught):
    os.kill(os.getpid(), caught)


def ignore_sigterm_with_a_child():
    """The child has the rank's output, and would keep its pipes open."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", code])
    sleep_for_an_hour()


def interrupt_the_launcher():
    """As a person does who types Ctrl-C twice."""
    for _ in range(2):
        os.kill(parent_process().pid, signal.SIGINT)
        time.sleep(0.05)
    sleep_for_an_hour()


def set_the_wall_clock_back(job, log):
    """By an hour at every look."""
    looks = iter(range(10**9))
    time.time = lambda: 1e9 - 3600.0 * next(looks)
    return run_cell(job, log)


def with_nvml(driver, job, log):
    """A rank whose device NVML speaks of as this stand-in does, asked as often as a short window allows."""
    stand_in = Driver(**driver)
    stand_in.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    telemetry_rank.open_nvml = lambda *_, **__: open_nvml(torch.device("cuda", 0), stand_in)
    telemetry_rank.PERIOD_S = 1e-3
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="1234")
    return run_cell(job, log)


class DeadProfiler(profile):
    """Never starts."""

    def start(self):
        raise RuntimeError("kineto is not there")


class TornTrace(profile):
    def export_chrome_trace(self, path):
        super().export_chrome_trace(path)
        os.truncate(path, Path(path).stat().st_size // 2)


def with_profiler(profiler, job, log):
    """On one rank of two: the other one has its own."""
    if job.rank == 1:
        trace.profile = profiler
    return run_cell(job, log)


def struck(folder):
    """When the first rank of any cell in this folder met its fault, and the ids of those that did."""
    notes = [path.read_text().split() for path in Path(folder).rglob(STRUCK.format(rank="*"))]
    return min((float(at_s) for at_s, _ in notes), default=None), [int(pid) for _, pid in notes]


def without_parity(entry, job, log):
    """A rank's whole life, as `entry` has it: nothing happens in parity, which takes a third of the time."""
    return (entry or run_cell)(replace(job, known=job.known | {"parity"}), log)
