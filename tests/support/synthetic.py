"""Write synthetic sweeps of any size, to see how the analysis scales.

`python -m tests.support.synthetic FOLDER COUNT` writes COUNT records. Their provenance is `synthetic`, which
no mode of the benchmark writes, so that they cannot be mistaken for results.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from bench.record.record import Provenance
from tests.support.records import make_failure, make_record, make_timing, write_sweep

AXES = {
    "seq_len": [1024 * 2**power for power in range(8)] + [96 * 1024, 192 * 1024, 384 * 1024, 768 * 1024],
    "strategy": ["local", "ulysses", "ring", "usp", "deepspeed_ulysses", "ring_flash_attn"],
    "engine": ["zero3", "fsdp2", "ddp"],
    "sp_degree": [2, 4, 8],
    "model": ["qwen3_0_6b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen2_5_7b", "llama3_1_8b"],
    "dtype": ["bf16", "fp32"],
    "checkpointing": [False, True],
    "batch": [1, 2],
    "kernel": ["torch_flash", "flash_attn_2"],
    "seed": [*range(100)],
}
"""Values of each axis; the first axes vary first, so a small sweep varies only lengths and strategies."""
FAILURES = ("out_of_memory", "timed_out", "killed", "unsupported")
FAILURE_SHARE = 0.08
STEPS = 20
ENVIRONMENT = {
    "cores": 64,
    "device_name": "a device that does not exist",
    "packages": {"torch": "2.13.0"},
    "argv": ["run_sweep.py", "-m", "seq_len=1k,2k"],
}


def synthetic_records(count):
    """Return `count` records of different cells, the same ones in every call."""
    random_numbers = random.Random(0)
    shapes = itertools.islice(itertools.product(*(AXES[key] for key in reversed(AXES))), count)
    configs = (dict(zip(reversed(AXES), shape, strict=True)) for shape in shapes)
    return [_record(random_numbers, order, config) for order, config in enumerate(configs)]


def _record(random_numbers, order, config):
    ranks = config["sp_degree"]
    common = {
        "config": config | {"cluster.world_size": ranks, **{f"model.detail_{i}": i for i in range(10)}},
        "provenance": Provenance.SYNTHETIC,
        "environment": ENVIRONMENT,
        "order": order,
        "started_at": f"2026-01-01T00:00:00.{order:06d}+00:00",
    }
    if random_numbers.random() < FAILURE_SHARE:
        status = random_numbers.choice(FAILURES)
        return make_failure(status, f"{status} with batch={config['batch']}", "a log\n" * 20, **common)
    step_ms = config["seq_len"] ** 1.3 / 1e3 * random_numbers.uniform(0.8, 1.2) / ranks
    steps_ms = [[step_ms * random_numbers.uniform(1, 1.1) for _ in range(STEPS)] for _ in range(ranks)]
    memory = [int(config["seq_len"] * 2**17 / ranks * random_numbers.uniform(1, 1.1))] * ranks
    return make_record(
        **common,
        timing=make_timing(steps_ms, config["seq_len"] * config["batch"]),
        losses={"loss": [5.5 - 0.01 * step for step in range(STEPS)]},
        memory={"peak_allocated_bytes": memory},
        trace=None,
    )


if __name__ == "__main__":
    write_sweep(Path(sys.argv[1]), synthetic_records(int(sys.argv[2])))
