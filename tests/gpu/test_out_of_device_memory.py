"""A GPU that is truly full: a record that says who asked for how much, and a device as good as before."""

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
SCORE_BYTES = 2
"""Of the `math` kernel's scores in bf16, [heads, tokens, tokens]: the first large block that it asks for."""
GIVEN_BACK_WITHIN_S = 10


def scores_bytes(cell):
    """What attention asks for at once."""
    heads = cell.model.num_heads // cell.ulysses_degree
    return heads * cell.seq_len**2 * SCORE_BYTES


def length_beyond(size_bytes, heads):
    """The shortest power of two whose scores are larger."""
    return 2 ** math.ceil(math.log2(math.sqrt(size_bytes / heads / SCORE_BYTES)) + 0.01)


@pytest.fixture
def used_bytes(strangers):
    """How much of the device is in use, by NVML."""
    opened = open_nvml(torch.device("cuda", 0))
    if isinstance(opened, str):
        pytest.skip(opened)
    return lambda: opened.nvml.nvmlDeviceGetMemoryInfo(opened.handle).used


def assert_ran_out_of_its_scores(record, cell):
    told = record.failure.out_of_memory
    assert (record.status, record.failure.phase, record.failure.step_phase) == (
        "out_of_memory",
        OUT_OF_MEMORY_IN,
        "forward",
    ), record.reason
    assert (told.memory, told.requested_bytes) == ("device", scores_bytes(cell))
    assert 0 < sum(block.total_bytes for block in told.largest) <= told.allocated_bytes
    return told


@pytest.mark.fault(27)
def test_a_length_that_cannot_fit_is_found_and_the_device_is_given_back(launcher, tmp_path, used_bytes):
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    words = ("strategy=local", "kernel=math", *QUICK)
    heads = gpu_cell(*words).model.num_heads
    cell = gpu_cell(*words, f"seq_len={length_beyond(total_bytes, heads)}")
    before = used_bytes()
    told = assert_ran_out_of_its_scores(run_on_gpu(launcher, cell, tmp_path / "long"), cell)
    assert told.limit_bytes is None
    until = time.monotonic() + GIVEN_BACK_WITHIN_S
    while used_bytes() > before + SLACK_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    assert used_bytes() <= before + SLACK_BYTES
    after = run_on_gpu(launcher, gpu_cell(*words, "seq_len=1k"), tmp_path / "short")
    assert after.status == "ok", after.reason


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ulysses", 2)])
def test_a_limit_below_what_the_device_has_is_found_by_every_rank_that_shares_it(
    launcher, tmp_path, strategy, ranks
):
    words = (f"strategy={strategy}", "kernel=math", *QUICK, "cluster.memory_limit_gib=0.5")
    short = run_on_gpu(launcher, gpu_cell(*words, "seq_len=1k", ranks=ranks), tmp_path / "short")
    assert short.status == "ok", short.reason
    cell = gpu_cell(*words, "seq_len=16k", ranks=ranks)
    record = run_on_gpu(launcher, cell, tmp_path / "long")
    told = assert_ran_out_of_its_scores(record, cell)
    assert told.limit_bytes == GIB // 2 < told.allocated_bytes + told.requested_bytes
    assert record.failure.detected_after_s < GIVEN_BACK_WITHIN_S
