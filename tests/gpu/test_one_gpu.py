"""One rank alone on a GPU: a real model through the command line, allocator settings, telemetry."""

import csv
import subprocess
import sys
import time

import pytest
import torch

from bench.common.environment import REPOSITORY, installed_version
from bench.cost.memory import memory_need
from bench.measure.telemetry.rank import TelemetrySampler, open_nvml
from bench.training.engines import ENGINE_FACTS
from tests.support.cells import make_cell
from tests.support.gpus import MACHINE, NEEDS_GPU, SOON_OVER, gpu_cell, run_on_gpu
from tests.support.records import read_lines

pytestmark = [*NEEDS_GPU]

STEPS, WARM_UP_S = 4, 2
ENOUGH_BYTES = 32 * 2**30
"""GPU memory that the cells need: 10 GB of model state, and 19 GB of activations without checkpointing."""
ESTIMATE_OFF = 0.15
"""Largest relative error of the estimate of peak memory, whose workspaces come from source code."""
FIRST_LOSS = (2, 14)
"""Range of the first timed loss: log(151,936) = 11.9 at random weights, less what warm-up steps learn."""


@pytest.mark.parametrize(
    ("engine", "checkpointing"), [*((engine, "auto") for engine in sorted(ENGINE_FACTS)), ("zero3", "false")]
)
def test_real_model_trains_at_8k_from_the_command_line(tmp_path, engine, checkpointing, strangers):
    package = ENGINE_FACTS[engine].package
    if package and installed_version(package) is None:
        pytest.skip(f"engine={engine} needs the package {package}")
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    if total_bytes < ENOUGH_BYTES:
        pytest.skip(f"needs a GPU of {ENOUGH_BYTES / 2**30:.0f} GiB")
    words = [
        "model=qwen3_0_6b", "seq_len=8k", "strategy=local", f"engine={engine}", "cluster=gpu",
        f"measure.steps={STEPS}", "measure.warmup_steps=1", f"measure.warmup_s={WARM_UP_S}",
        f"checkpointing={checkpointing}", *SOON_OVER,
    ]  # fmt: skip
    command = [sys.executable, str(REPOSITORY / "run_sweep.py"), *words, "sweep_dir=out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_lines(tmp_path / "out" / "records.jsonl")
    (steps_ms,) = record["timing"]["step_times_ms"]
    assert (len(steps_ms), record["timing"]["warmup"]) == (STEPS, "full")
    assert sum(steps_ms) == pytest.approx(record["timing"]["window_ms"][0], rel=0.05)
    assert FIRST_LOSS[0] < record["losses"]["loss"][0] < FIRST_LOSS[1]
    memory = record["memory"]
    assert 0 < memory["peak_allocated_bytes"][0] <= memory["peak_reserved_bytes"][0] < total_bytes
    assert memory["peak_phase"][0] in {"load", "forward", "loss", "backward", "optimizer"}
    assert record["config"]["checkpointing"] == (checkpointing == "auto")
    need = memory_need(make_cell(*words, machine=MACHINE))
    assert memory["peak_allocated_bytes"][0] == pytest.approx(
        need.total_bytes - need.context, rel=ESTIMATE_OFF
    )
    assert memory["allocator_settings"]["backend"] == "native"
    assert record["telemetry"]["other_processes"] in (None, [strangers])
    environment = record["environment"]
    assert environment["nccl_version"].count(".") >= 2
    assert (len(environment["gpu_power_limit_w"]), len(environment["gpu_nvlinks"])) == (1, 1) or (
        len(environment["gpus"]) > 1
    )
    with (tmp_path / "out" / "summary.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["tokens_per_s"]) > 0
    if record["config"]["hardware"] != "unknown":
        assert 0 < float(row["mfu_causal"]) < 1


SETTINGS = {
    "expandable_segments:True": {"expandable_segments": "True"},
    "max_split_size_mb:256,garbage_collection_threshold:0.8": {"max_split_size": str(256 * 2**20)},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_allocator_settings_are_in_effect(launcher, tmp_path, setting):
    words = ("strategy=local", "engine=ddp", "seq_len=1k", "measure.steps=1", "measure.trace=false")
    cell = gpu_cell(*words, f"++env.PYTORCH_ALLOC_CONF='{setting}'")
    record = run_on_gpu(launcher, cell, tmp_path)
    assert record.status == "ok", record.reason
    assert SETTINGS[setting].items() <= record.memory.allocator_settings.items()


def test_nvml_reports_power_clock_and_other_processes(strangers):
    a = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
    device = open_nvml(torch.device("cuda", 0))
    assert not isinstance(device, str), device
    telemetry = TelemetrySampler(device, period_s=0.05)
    until = time.monotonic() + 1
    with telemetry.window():
        while time.monotonic() < until:
            a @ a
            torch.cuda.synchronize()
    found = telemetry.read()
    if found.power_w is None:
        pytest.skip(found.reason)
    (power_w,), (clock_mhz,), (reference_mhz,) = found.power_w, found.sm_clock_mhz, found.reference_clock_mhz
    assert len(power_w) == len(clock_mhz) >= 3
    assert 0 < max(clock_mhz) <= reference_mhz
    assert max(power_w) > 0
    assert found.other_processes in (None, [0])
