"""Every strategy trains the same objective as one rank does: loss, gradient norm, every gradient."""

import itertools

import numpy as np
import pytest

from bench.request.legality import ENGINE_DTYPES
from bench.strategies import STRATEGIES
from tests import faults
from tests.cells import run_cell, tiny_cell

FP64_LIMIT = 1e-12
FP32_LIMIT = 1e-5
ZERO3_LIMIT = 1e-6
"""ZeRO-3 knows no float64; the two others are held to 1e-12 there."""
BF16_FLOOR = 2e-2
ENGINES = sorted(ENGINE_DTYPES)
FP64_ENGINES = [engine for engine in ENGINES if "fp64" in ENGINE_DTYPES[engine]]
PARALLEL = [name for name, facts in STRATEGIES.items() if facts.shares_sequences]
OURS = [name for name in PARALLEL if STRATEGIES[name].package is None]
PACKAGES = [name for name in PARALLEL if name not in OURS]
BATCHES = {
    "all tokens count": (),
    "uneven, one rank with none": ("data.prompt_tokens=100",),
    "accumulated": ("grad_accum=2", "batch=2"),
}
RANKS = ("cluster.world_size=4", "measure.gradients=true")


def grid(strategies):
    """Strategy x engine x batch: every pair of two is always run, the rest of the grid is slow."""
    axes = itertools.product(enumerate(strategies), enumerate(ENGINES), enumerate(BATCHES))
    return [
        pytest.param(strategy, engine, batch, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
        for (i, strategy), (j, engine), (k, batch) in axes
    ]


@pytest.fixture(scope="module")
def gradients(launcher, tmp_path_factory):
    """Loss, gradient norm and every gradient of a cell; each cell is run once."""
    known = {}

    def of(*overrides, entry=None):
        key = (overrides, entry)
        if key not in known:
            cell = tiny_cell(*RANKS, *overrides)
            record, folder = run_cell(launcher, cell, tmp_path_factory.mktemp("cell"), entry)
            assert record.status == "ok", record.reason
            with np.load(folder / "gradients.npz") as arrays:
                known[key] = {name.removeprefix("module."): arrays[name] for name in arrays}
        return known[key]

    return of


def worst_error(found, expected):
    """The largest relative error of any gradient, the loss or the norm, by Euclidean length."""
    assert found.keys() == expected.keys()
    return max(
        np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name]) for name in expected
    )


@pytest.mark.parametrize(
    ("strategy", "engine", "batch"), grid([n for n in PARALLEL if "fp32" in STRATEGIES[n].dtypes])
)
def test_float32_gradients_equal_those_of_one_rank(gradients, strategy, engine, batch):
    words = (f"engine={engine}", "dtype=fp32", *BATCHES[batch])
    found = gradients(f"strategy={strategy}", *words)
    limit = ZERO3_LIMIT if engine == "zero3" else FP32_LIMIT
    assert worst_error(found, gradients("strategy=local", *words)) < limit


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("engine", FP64_ENGINES)
def test_float64_gradients_of_the_ring_equal_those_of_one_rank(gradients, engine, layout):
    words = (f"engine={engine}", "dtype=fp64", "data.prompt_tokens=100")
    found = gradients("strategy=ring", f"layout={layout}", *words)
    assert worst_error(found, gradients("strategy=local", *words)) < FP64_LIMIT


@pytest.mark.parametrize("engine", FP64_ENGINES)
@pytest.mark.parametrize("strategy", ["ulysses", "usp"])
def test_float64_gradients_of_shared_heads_equal_those_of_one_rank(gradients, strategy, engine):
    words = (f"engine={engine}", "dtype=fp64", "data.prompt_tokens=100")
    found = gradients(f"strategy={strategy}", *words)
    assert worst_error(found, gradients("strategy=local", *words)) < FP64_LIMIT


@pytest.mark.parametrize(("strategy", "engine", "batch"), grid(PACKAGES))
def test_bf16_gradients_err_at_most_twice_as_much_as_one_rank_does(gradients, strategy, engine, batch):
    words = (f"engine={engine}", *BATCHES[batch])
    exact = gradients("strategy=local", "dtype=fp32", *words)
    plain_error = worst_error(gradients("strategy=local", *words), exact)
    assert worst_error(gradients(f"strategy={strategy}", *words), exact) < max(BF16_FLOOR, 2 * plain_error)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_sequence_groups_train_the_same_step_as_accumulation_does(gradients, engine):
    words = (f"engine={engine}", "dtype=fp32", "data.prompt_tokens=150")
    side_by_side = gradients("strategy=ulysses", "sp_degree=2", "dp_shard=2", *words)
    in_turn = gradients("strategy=local", "grad_accum=2", *words)
    assert worst_error(side_by_side, in_turn) < FP32_LIMIT


def test_replicated_shards_train_the_same_step_as_accumulation_does(gradients):
    words = ("engine=fsdp2", "dtype=fp32")
    hybrid = gradients("strategy=ulysses", "sp_degree=2", "dp_replicate=2", *words)
    assert worst_error(hybrid, gradients("strategy=local", "grad_accum=2", *words)) < FP32_LIMIT


@pytest.mark.parametrize("strategy", ["ulysses", "deepspeed_ulysses", "ring_flash_attn"])
def test_a_divisor_wrong_by_sp_degree_never_becomes_a_number(launcher, tmp_path, strategy):
    cell = tiny_cell(*RANKS, f"strategy={strategy}", "engine=ddp", "data.prompt_tokens=100")
    record, _ = run_cell(launcher, cell, tmp_path, faults.divide_by_sp_degree)
    assert record.status == "wrong_result"
    assert "gradients are exactly 1/sp_degree = 0.25 times too large" in record.reason
