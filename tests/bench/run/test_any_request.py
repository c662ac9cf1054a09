"""Any request is planned, predicted or refused in one line, for all pairs of choices on all known devices."""

import itertools
import random
from pathlib import Path

import pytest
import yaml

from bench.attention import kernel_facts
from bench.common.environment import Machine
from bench.config import ConfigError
from bench.extras.predict.prediction import expected_by_cost_model
from bench.plan.estimate import Estimate
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import short_lines, whole_plan
from bench.record.store import line_of
from bench.request import packages
from bench.request.choices import groups, read_option
from bench.request.hardware import known_hardware
from bench.request.legality import refusal
from bench.run.cell import outcome as cell_outcome
from bench.run.cell.run import run
from bench.strategies import STRATEGIES
from tests.support.cells import TWO_CORES, raw_with

CHOICES = frozenset(groups())
COUNTS = (1, 2, 3, 4, 6, 8)
NO_FILE = "a GPU without a file"
DEVICES = ("cpu", (NO_FILE, 4), *itertools.product(sorted(known_hardware()), COUNTS))
AXES = {
    "strategy": [f"strategy={name}" for name in STRATEGIES],
    "degree": [
        "", "sp_degree=1", "sp_degree=2", "sp_degree=3", "sp_degree=4", "ulysses_degree=1",
        "ulysses_degree=2", "dp_shard=2", "dp_replicate=2", "cluster.world_size=1", "cluster.world_size=3",
        "sp_degree=2 dp_shard=2", "sp_degree=4 ulysses_degree=4", "cluster.ranks_per_gpu=4",
        "cluster=nodes cluster.nodes=2 cluster.world_size=16", "cluster=nodes cluster.nodes=2",
    ],
    "workload": ["", "workload=attention", "workload=attention workload.mask=full"],
    "trainer": ["", "trainer=accelerate", "trainer=transformers", "trainer=trl"],
    "engine": ["engine=zero3", "engine=fsdp2", "engine=ddp"],
    "kernel": ["", *(f"kernel={name}" for name in ("math", "flash_blocks", "cudnn", "flash_attn_2",
                                                   "flash_attn_3", "flash_attn_4"))],
    "length": [
        "seq_len=8k", "seq_len=96k", "seq_len=1m", "seq_len=1001 pad=true", "seq_len=1001", "seq_len=1",
    ],
    "mode": ["mode=measure", "mode=predict"],
    "model": ["", "model=qwen3_nano", "model=qwen2_5_7b", "model=qwen3_32b"],
    "more": [
        "", "dtype=fp32", "dtype=fp64", "dtype=fp16", "checkpointing=true", "checkpointing=false",
        "loss=untiled", "tiled_mlp=true", "offload.activations=true", "offload.optimizer=true",
        "data.packing=documents", "layout=striped", "batch=2 grad_accum=4", "optimizer=sgd",
        "cluster.memory_limit_gib=0.5", "measure.budget_s=1", "hardware=cpu", "cluster=cpu",
    ],
    "device": DEVICES,
}  # fmt: skip
CHANGED = 0.4
"""Probability that an axis gets a random value; with all of them random, nearly every request is refused."""
LEAST = 2500


def some_request(chance, **fixed):
    """Return a request with the `fixed` values and, on the other axes, mostly the first value."""
    free_axes = {axis: values for axis, values in AXES.items() if axis not in fixed}
    return fixed | {
        axis: chance.choice(values) if chance.random() < CHANGED or axis == "mode" else values[0]
        for axis, values in free_axes.items()
    }


def pairs_of(request):
    return {frozenset(pair) for pair in itertools.combinations(request.items(), 2)}


def pairwise_requests():
    """Return requests in which every two values of two axes occur together."""
    chance, requests, covered = random.Random(16), [], set()
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[one], AXES[other]):
            fixed = dict(zip((one, other), pair, strict=True))
            if not pairs_of(fixed) <= covered:
                requests.append(some_request(chance, **fixed))
                covered |= pairs_of(requests[-1])
    return requests


def words_of(request):
    """Return the words of a request on the command line; a prediction names its hardware."""
    words = " ".join(value for axis, value in request.items() if axis != "device" and value).split()
    device = request["device"]
    if request["mode"] == "mode=predict" and device != "cpu" and device[0] != NO_FILE:
        hardware, count = device
        words = [f"hardware={hardware}", f"cluster.world_size={count}", *words]
    return [*{word.partition("=")[0]: word for word in words}.values()]  # the last of a key counts


def machine_of(device):
    if device == "cpu":
        return TWO_CORES
    hardware, count = device
    name = hardware if hardware == NO_FILE else known_hardware()[hardware]["device_names"][0]
    return Machine(gpus=(name,) * count, cores=64, cpu="x", memory_bytes=2**40,
                   gpu_memory_bytes=(24 * 2**30,) * count, gpu_capabilities=("9.0",) * count)  # fmt: skip


def raw_of(words):
    """Return the request that Hydra composes of these words, without Hydra, which needs 0.1 s."""
    pairs = [word.partition("=")[::2] for word in words]
    chosen = {key: read_option(key, value) for key, value in pairs if key in CHOICES}
    values = {key: yaml.safe_load(value) for key, value in pairs if key not in CHOICES}
    return raw_with({"sweep_dir": "out", **chosen, **values})


def outcome(raw, machine):
    """Return `refused`, `planned` or `predicted`; any other exception is a bug."""
    try:
        made = plan([raw], machine, single=False)
    except ConfigError as error:
        assert_one_line(str(error))
        return "refused"
    forecast = Forecast(made, made.cells, Estimate(expected_by_cost_model))
    for line in [*whole_plan(forecast, [raw]), *short_lines(forecast), *made.notes]:
        assert "\n" not in line
    (planned,) = made.cells
    reason = refusal(planned.cell)
    if reason is not None:
        assert_one_line(reason)
        return "refused"
    if planned.cell.mode == "predict":
        line_of(run(planned, None, Path()))
        return "predicted"
    return "planned"


def assert_one_line(text):
    assert text.strip()
    assert "\n" not in text
    assert "Traceback" not in text


@pytest.fixture(autouse=True)
def _all_packages(monkeypatch):
    """Treat every package as installed, as a cell that lacks one is refused before anything is computed.

    Records do not ask git for the commit, which would take most of the time.
    """
    for module in (packages, kernel_facts):
        monkeypatch.setattr(module, "installed_version", lambda package: f"any {package}")
    monkeypatch.setattr(cell_outcome, "describe_environment", lambda _: {})


def test_any_request_is_planned_predicted_or_refused():
    requests = pairwise_requests()
    covered = set().union(*map(pairs_of, requests))
    axes = itertools.combinations(AXES.values(), 2)
    assert len(covered) == sum(
        len(one) * len(other) for one, other in axes
    )  # every two values occur together
    counts, faults = dict.fromkeys(("planned", "predicted", "refused"), 0), {}
    for request in requests:
        words = words_of(request)
        try:
            counts[outcome(raw_of(words), machine_of(request["device"]))] += 1
        except Exception as error:  # noqa: BLE001  all faults are reported together
            faults.setdefault(f"{type(error).__name__}: {error}"[:200], []).append((request["device"], words))
    assert not faults, "\n".join(
        f"{len(where)} x {error}; first {where[0]}" for error, where in faults.items()
    )
    assert min(counts.values()) > LEAST / 20, counts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ulysses_degree_above_sp_degree_is_refused(strategy):
    words = [f"strategy={strategy}", "ulysses_degree=2", "sp_degree=1"]
    assert outcome(raw_of(words), machine_of(("h100_80gb", 4))) == "refused"
