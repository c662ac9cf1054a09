"""Out of memory on a real GPU: the record has the failed request, and the device is usable afterwards."""

import math
import time

import pytest
import torch

from bench.measure.telemetry.rank import open_nvml
from tests.support.gpus import NEEDS_GPU, OUT_OF_MEMORY_IN, gpu_cell, run_on_gpu

pytestmark = [*NEEDS_GPU]

GIB = 2**30
SLACK_BYTES = 16 * 2**20
QUICK = ("engine=ddp", "measure.steps=1", "measure.warmup_steps=0", "measure.trace=false")
SCORE_BYTES = 4
"""Bytes of a float32 score; the `math` kernel's first large allocation is [heads, tokens, tokens] scores."""
FREED_WITHIN_S = 10


def scores_bytes(cell):
    """Return the bytes of attention's scores, which are one allocation."""
    heads = cell.model.num_heads // cell.ulysses_degree
    return heads * cell.seq_len**2 * SCORE_BYTES


def length_beyond(size_bytes, heads):
    """Return the smallest power of two whose scores take more than `size_bytes`."""
    return 2 ** math.ceil(math.log2(math.sqrt(size_bytes / heads / SCORE_BYTES)) + 0.01)


@pytest.fixture
def used_bytes(strangers):
    """Return a function that returns the device's memory in use, by NVML."""
    device = open_nvml(torch.device("cuda", 0))
    if isinstance(device, str):
        pytest.skip(device)
    return lambda: device.nvml.nvmlDeviceGetMemoryInfo(device.handle).used


def assert_ran_out_of_its_scores(record, cell):
    error = record.failure.out_of_memory
    assert (record.status, record.failure.phase, record.failure.step_phase) == (
        "out_of_memory",
        OUT_OF_MEMORY_IN,
        "forward",
    ), record.reason
    assert (error.memory, error.requested_bytes) == ("device", scores_bytes(cell))
    assert 0 < sum(block.total_bytes for block in error.largest) <= error.allocated_bytes
    return error


@pytest.mark.fault(27)
def test_oversized_cell_runs_out_of_memory_and_frees_the_device(launcher, tmp_path, used_bytes):
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    words = ("strategy=local", "kernel=math", *QUICK)
    heads = gpu_cell(*words).model.num_heads
    cell = gpu_cell(*words, f"seq_len={length_beyond(total_bytes, heads)}")
    before = used_bytes()
    error = assert_ran_out_of_its_scores(run_on_gpu(launcher, cell, tmp_path / "long"), cell)
    assert error.limit_bytes is None
    until = time.monotonic() + FREED_WITHIN_S
    while used_bytes() > before + SLACK_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    assert used_bytes() <= before + SLACK_BYTES
    after = run_on_gpu(launcher, gpu_cell(*words, "seq_len=1k"), tmp_path / "short")
    assert after.status == "ok", after.reason


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ulysses", 2)])
def test_memory_limit_stops_every_rank_that_shares_the_device(launcher, tmp_path, strategy, ranks):
    words = (f"strategy={strategy}", "kernel=math", *QUICK, "cluster.memory_limit_gib=0.5")
    short = run_on_gpu(launcher, gpu_cell(*words, "seq_len=1k", ranks=ranks), tmp_path / "short")
    assert short.status == "ok", short.reason
    cell = gpu_cell(*words, "seq_len=16k", ranks=ranks)
    record = run_on_gpu(launcher, cell, tmp_path / "long")
    error = assert_ran_out_of_its_scores(record, cell)
    assert error.limit_bytes == GIB // 2 < error.allocated_bytes + error.requested_bytes
    assert record.failure.detected_after_s < FREED_WITHIN_S
