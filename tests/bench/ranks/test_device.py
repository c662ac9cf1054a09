"""A rank's GPU and NCCL environment, and that only ranks initialize CUDA."""

import os
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import pytest
import torch

from bench.common.environment import Machine
from bench.ranks.device import SHARED_GPU_NCCL, claim_device, finish_together, release_unused
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.run.node.worker import join
from bench.strategies import STRATEGIES
from tests.support.cells import (
    FOUR_H100,
    INSTALLED,
    ONE_H200,
    TINY,
    make_cell,
    make_raw,
    run_cell,
    tiny_cell,
    with_strategy,
    words_for,
)
from tests.support.command import run_command

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that makes torch ask NVML for GPUs, so that the fork server does not initialize CUDA."""
NCCL = ("NCCL_HOSTID", *SHARED_GPU_NCCL)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", [name for name in INSTALLED if STRATEGIES[name].shares_sequences])
def test_every_strategy_is_legal_on_ranks_that_share_a_gpu(strategy, ranks):
    words = ("cluster=gpu", f"cluster.ranks_per_gpu={ranks}", "model=qwen3_nano", *words_for(strategy))
    cell = resolve(with_strategy(make_raw(*words), strategy), ONE_H200)
    assert (cell.cluster.world_size, cell.sp_degree, cell.cluster.backend) == (ranks, ranks, "nccl")
    assert cell.flat()["cluster.ranks_per_gpu"] == ranks
    assert refusal(cell) is None


def test_one_rank_has_ranks_per_gpu_1():
    default = make_cell("strategy=local", machine=ONE_H200)
    shared = make_cell("strategy=local", "cluster.ranks_per_gpu=4", machine=ONE_H200)
    assert (default.cell_id, default.cluster.ranks_per_gpu) == (shared.cell_id, 1)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_gpu", "devices", "sharers"),
    [
        (4, 1, [0, 1, 2, 3], [0, 0, 0, 0]),
        (5, 2, [0, 0, 1, 1, 2], [1, 1, 1, 1, 0]),
    ],
)
def test_consecutive_ranks_share_a_gpu(world_size, ranks_per_gpu, devices, sharers):
    words = (f"cluster.world_size={world_size}", f"cluster.ranks_per_gpu={ranks_per_gpu}")
    cluster = make_cell(*words, machine=FOUR_H100).cluster
    assert [cluster.device_index(rank) for rank in range(world_size)] == devices
    assert [cluster.ranks_sharing_gpu(rank) for rank in range(world_size)] == sharers


def report_environment(job, log):
    """Variables by which libraries choose the rank's device, and those of NCCL."""
    return {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", NVML_CHECK, *NCCL)}


def environments(launcher, folder, *words, machine=ONE_H200):
    ends = launcher.run(make_cell(*words, machine=machine), folder, entry=report_environment)
    assert all(end.report is not None for end in ends), ends[0].log_tail
    return [end.report for end in ends]


def test_shared_gpu_ranks_have_own_nccl_hostid_and_local_rank(launcher, tmp_path):
    machine = Machine(gpus=("NVIDIA H200",) * 2, cores=16, cpu="x", memory_bytes=2**37)
    words = ("cluster.ranks_per_gpu=2", "++env.NCCL_NET=IB")
    reports = environments(launcher, tmp_path, *words, machine=machine)
    assert [report["RANK"] for report in reports] == ["0", "1", "2", "3"]
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "0", "1", "1"]
    assert len({report["NCCL_HOSTID"] for report in reports}) == 4
    for report in reports:
        assert {name: report[name] for name in SHARED_GPU_NCCL} == {**SHARED_GPU_NCCL, "NCCL_NET": "IB"}


def test_ranks_with_separate_gpus_set_no_nccl_variables(launcher, tmp_path):
    reports = environments(launcher, tmp_path, "cluster.world_size=2", machine=FOUR_H100)
    for rank, report in enumerate(reports):
        assert (report["LOCAL_RANK"], report[NVML_CHECK]) == (str(rank), "1")
        assert {report[name] for name in NCCL} == {None}


def test_claim_device_uses_local_rank(monkeypatch):
    claimed = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    device = claim_device(make_cell(machine=FOUR_H100).cluster)
    assert (device, claimed) == (torch.device("cuda", 3), [device])


class Cycle:
    """Object in a reference cycle, like a model and its hooks."""

    def __init__(self):
        self.itself = self


def test_release_unused_frees_cycles_and_empties_the_cache(monkeypatch):
    cycle, freed = weakref.ref(Cycle()), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(cycle() is None))
    release_unused(torch.device("cpu"))
    assert freed == []
    release_unused(torch.device("cuda", 0))
    assert freed == [True]


LATE_S = 0.5


def finish_late_in_rank_1(job, log):
    """Seconds that each rank waited at its end; the GPU is fake."""
    torch.cuda.synchronize = lambda device: None
    join(job)
    if job.rank == 1:
        time.sleep(LATE_S)
    start = time.monotonic()
    finish_together(torch.device("cuda"))
    return {"waited_s": time.monotonic() - start}


def test_finish_together_waits_for_the_last_rank(launcher, tmp_path):
    ends = launcher.run(make_cell("cluster.world_size=4"), tmp_path, entry=finish_late_in_rank_1)
    assert all(end.report is not None for end in ends), ends[0].log_tail
    waited_s = [end.report["waited_s"] for end in ends]
    assert waited_s[1] < LATE_S / 2 < min(waited_s[0], *waited_s[2:])


TOUCHES_CUDA = """
import sys, traceback
import torch
import pynvml

asked = []

def refuse(name):
    def call(*args, **kwargs):
        asked.append(name + "".join(traceback.format_stack(limit=6)))
        raise RuntimeError(name)
    return call

for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse(name))
pynvml.nvmlInit = refuse("nvmlInit")
import bench.run.node.preload
sys.exit("\\n".join(asked) or 0)
"""


def test_fork_server_imports_do_not_query_cuda_or_nvml():
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}  # as in the fork server
    done = subprocess.run(
        [sys.executable, "-c", TOUCHES_CUDA], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


PACKAGES = ("deepspeed", "ring_flash_attn")


@pytest.mark.ranks
def test_own_strategies_run_without_optional_packages(tmp_path):
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    words = ("strategy=ring", "engine=fsdp2", "cluster=cpu", "sweep_dir=out")
    done = run_command(tmp_path, *TINY, *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_allocator_settings_that_torch_rejects_are_unsupported(launcher, tmp_path):
    """CPU ranks do not use CUDA's allocator, but torch parses its settings there, too."""
    env = (("PYTORCH_ALLOC_CONF", "max_split_size_mb:1"),)
    record, _ = run_cell(launcher, replace(tiny_cell("strategy=local", "engine=ddp"), env=env), tmp_path)
    assert record.status == "unsupported"
    assert re.fullmatch(r"rank 0, start: .*_mb:1: torch .* rejects it: .* must be >= 20", record.reason)
