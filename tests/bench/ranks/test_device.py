"""Which GPU a rank is on, what it tells NCCL, and that nothing but a rank ever touches CUDA."""

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
from tests.support.command import typed

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch asks NVML whether there is a GPU: a library that asks in the server starts no CUDA there."""
NCCL = ("NCCL_HOSTID", *SHARED_GPU_NCCL)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", [name for name in INSTALLED if STRATEGIES[name].shares_sequences])
def test_on_one_gpu_every_strategy_is_legal_on_ranks_that_share_it(strategy, ranks):
    words = ("cluster=gpu", f"cluster.ranks_per_gpu={ranks}", "model=qwen3_nano", *words_for(strategy))
    cell = resolve(with_strategy(make_raw(*words), strategy), ONE_H200)
    assert (cell.cluster.world_size, cell.sp_degree, cell.cluster.backend) == (ranks, ranks, "nccl")
    assert cell.flat()["cluster.ranks_per_gpu"] == ranks
    assert refusal(cell) is None


def test_a_rank_alone_shares_no_gpu_whatever_is_asked_of_the_others():
    alone = make_cell("strategy=local", machine=ONE_H200)
    among = make_cell("strategy=local", "cluster.ranks_per_gpu=4", machine=ONE_H200)
    assert (alone.cell_id, alone.cluster.ranks_per_gpu) == (among.cell_id, 1)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_gpu", "devices", "beside"),
    [
        (4, 1, [0, 1, 2, 3], [0, 0, 0, 0]),
        (5, 2, [0, 0, 1, 1, 2], [1, 1, 1, 1, 0]),
    ],
)
def test_neighbours_in_rank_share_a_gpu(world_size, ranks_per_gpu, devices, beside):
    words = (f"cluster.world_size={world_size}", f"cluster.ranks_per_gpu={ranks_per_gpu}")
    cluster = make_cell(*words, machine=FOUR_H100).cluster
    assert [cluster.device_index(rank) for rank in range(world_size)] == devices
    assert [cluster.ranks_beside(rank) for rank in range(world_size)] == beside


def tell_device(job, log):
    """What a rank's libraries would take for its device, and what NCCL would read."""
    return {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", NVML_CHECK, *NCCL)}


def told(launcher, folder, *words, machine=ONE_H200):
    ends = launcher.run(make_cell(*words, machine=machine), folder, entry=tell_device)
    assert all(end.report is not None for end in ends), ends[0].log_tail
    return [end.report for end in ends]


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl_and_local_rank_is_the_device(
    launcher, tmp_path
):
    machine = Machine(gpus=("NVIDIA H200",) * 2, cores=16, cpu="x", memory_bytes=2**37)
    reports = told(launcher, tmp_path, "cluster.ranks_per_gpu=2", "++env.NCCL_NET=IB", machine=machine)
    assert [report["RANK"] for report in reports] == ["0", "1", "2", "3"]
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "0", "1", "1"]
    assert len({report["NCCL_HOSTID"] for report in reports}) == 4
    for report in reports:
        assert {name: report[name] for name in SHARED_GPU_NCCL} == {**SHARED_GPU_NCCL, "NCCL_NET": "IB"}


def test_ranks_with_gpus_of_their_own_tell_nccl_nothing(launcher, tmp_path):
    for rank, report in enumerate(told(launcher, tmp_path, "cluster.world_size=2", machine=FOUR_H100)):
        assert (report["LOCAL_RANK"], report[NVML_CHECK]) == (str(rank), "1")
        assert {report[name] for name in NCCL} == {None}


def test_a_rank_claims_the_gpu_that_local_rank_names(monkeypatch):
    claimed = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    device = claim_device(make_cell(machine=FOUR_H100).cluster)
    assert (device, claimed) == (torch.device("cuda", 3), [device])


class Cycle:
    """Objects that hold one another, as a model and its hooks do."""

    def __init__(self):
        self.itself = self


def test_a_gpu_s_unused_memory_is_given_back_and_what_a_cycle_of_objects_held(monkeypatch):
    held, gone = weakref.ref(Cycle()), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(held() is None))
    release_unused(torch.device("cpu"))
    assert gone == []
    release_unused(torch.device("cuda", 0))
    assert gone == [True]


LATE_S = 0.5


def finish_late_in_rank_1(job, log):
    """How long each rank waited for the others at its end; the device is none that can be waited for."""
    torch.cuda.synchronize = lambda device: None
    join(job)
    if job.rank == 1:
        time.sleep(LATE_S)
    start = time.monotonic()
    finish_together(torch.device("cuda"))
    return {"waited_s": time.monotonic() - start}


def test_no_rank_leaves_before_the_last_has_done_its_work(launcher, tmp_path):
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


def test_what_the_fork_server_imports_asks_neither_cuda_nor_its_driver():
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}  # as the server has it
    done = subprocess.run(
        [sys.executable, "-c", TOUCHES_CUDA], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


PACKAGES = ("deepspeed", "ring_flash_attn")


@pytest.mark.ranks
def test_without_the_packages_of_others_ours_still_run(tmp_path):
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    words = ("strategy=ring", "engine=fsdp2", "cluster=cpu", "sweep_dir=out")
    done = typed(tmp_path, *TINY, *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cell_is_unsupported_where_torch_rejects_its_allocator_s_settings(launcher, tmp_path):
    """Ranks on a CPU have no such allocator, but torch parses its settings there, too."""
    env = (("PYTORCH_ALLOC_CONF", "max_split_size_mb:1"),)
    record, _ = run_cell(launcher, replace(tiny_cell("strategy=local", "engine=ddp"), env=env), tmp_path)
    assert record.status == "unsupported"
    assert re.fullmatch(r"rank 0, start: .*_mb:1: torch .* refuses it: .* must be >= 20", record.reason)
