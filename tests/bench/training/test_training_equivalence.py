"""Every strategy trains the same objective as one rank does: loss, gradient norm, every gradient."""

import itertools

import numpy as np
import pytest

from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from tests.support.cells import INSTALLED, run_cell, tiny_cell, words_for
from tests.support.faults import acts
from tests.support.many_cells import chosen, gradients_of

FP64_LIMIT = 1e-12
FP32_LIMIT = 1e-6
"""ZeRO-3 knows no float64; the two others are held to 1e-12 there."""
BF16_FLOOR = 2e-2
ENGINES = sorted(ENGINE_FACTS)
FP64_ENGINES = [engine for engine in ENGINES if "fp64" in ENGINE_FACTS[engine].dtypes]
PARALLEL = [name for name in INSTALLED if STRATEGIES[name].shares_sequences]
SWITCHES = {
    "tiled_mlp": ("tiled_mlp=true",),
    "tiled_mlp, checkpointed": ("tiled_mlp=true", "checkpointing=true"),
    "offload.activations": ("offload.activations=true", "checkpointing=true"),
    "all": ("tiled_mlp=true", "checkpointing=true", "offload.activations=true"),
}
PACKAGES = [name for name in PARALLEL if STRATEGIES[name].package is not None]
FLOAT32 = [name for name in PARALLEL if "fp32" in STRATEGIES[name].dtypes]
BATCHES = {
    "all tokens count": (),
    "uneven, one rank with none": ("data.prompt_tokens=150",),
    "accumulated": ("grad_accum=2", "batch=2"),
}
PACKED = ("data=synthetic", "data.packing=documents")
"""Boundaries anywhere in a shard, and documents of one token."""
GRIDS = {
    "2x1x2": ("ring", ("dp_replicate=2", "sp_degree=2"), 2),
    "1x2x2": ("ulysses", ("dp_shard=2", "sp_degree=2"), 2),
    "1x1x4": ("usp", ("sp_degree=4",), 1),
    "1x4x1": ("ring", ("dp_shard=4", "sp_degree=1"), 4),
}
"""dp_replicate x dp_shard x sp_degree, a strategy to run it with, and how many sequences a step has."""
TWO_DIMENSIONAL = ("usp",)
UNEVEN = BATCHES["uneven, one rank with none"]
TWO_PACKED = (*PACKED, "batch=2")
KEPT = ("checkpointing=true", "strategy.checkpoints=attention_output")
ALONE = {
    **{f"ring {layout}": ("ring", UNEVEN, (f"layout={layout}",)) for layout in STRATEGIES["ring"].layouts},
    **{name: (name, UNEVEN, ()) for name in ("ulysses", "ulysses_chunked", "usp")},
    "kept outputs": ("distflash_attn", UNEVEN, KEPT),
    **{
        f"ring {layout}, packed": ("ring", TWO_PACKED, (f"layout={layout}",))
        for layout in STRATEGIES["ring"].layouts
    },
    **{f"{name}, packed": (name, TWO_PACKED, ()) for name in ("ulysses", "usp")},
    "padded": ("ring", ("seq_len=250",), ("pad=true",)),
    "padded, packed": ("ring", ("seq_len=250", *PACKED), ("pad=true",)),
}
"""A strategy, words of it and of one rank that does the same, and words of its own."""
IN_TWO_DIMENSIONS = {
    grid: (strategy, (*PACKED, "data.prompt_tokens=64"), degrees, (f"grad_accum={sequences}",))
    for grid, (strategy, degrees, sequences) in GRIDS.items()
}
"""Most ranks hold no token that counts; one rank accumulates what others share out."""
RANKS = ("cluster.world_size=4", "measure.gradients=true", "model=qwen3_nano", "model.intermediate_size=1600")
"""ZeRO-3 shards no weight of fewer than 100,000 numbers: here those of the MLP are sharded."""


def words(strategy, engine, dtype, *more, heads_of=None):
    """With the heads that another strategy needs, where it is compared with that."""
    heads = words_for(heads_of or strategy)
    return (f"strategy={strategy}", f"engine={engine}", f"dtype={dtype}", *heads, *more)


def ranks(strategy):
    """As few as have every kind of neighbour that the strategy knows."""
    return () if strategy in TWO_DIMENSIONAL else ("cluster.world_size=2",)


def unless(is_slow):
    return pytest.mark.slow if is_slow else ()


def grid(strategies, *compared, all_engines=False):
    """Strategy x engine x batch: some are always run, the rest of the grid is slow.

    `compared` are the cells of each case: the strategy, None for the case's own, and the dtype. Two ranks
    are enough for what only an engine and a strategy together get wrong; `test_strategies` has four.
    Strategies take turns in the engines, unless each goes through all of them.
    """
    quick = {
        (i, j, k)
        for i in range(len(strategies))
        for j, k in itertools.product(range(len(ENGINES)), range(len(BATCHES)))
        if (i + j + k) % 3 == 0 and (all_engines or j == i % 3)
    }
    axes = itertools.product(enumerate(strategies), enumerate(ENGINES), enumerate(BATCHES))
    return [
        pytest.param(
            tuple(
                (
                    *words(other or strategy, engine, dtype, *BATCHES[batch], heads_of=strategy),
                    *ranks(strategy),
                )
                for other, dtype in compared
            ),
            id=f"{strategy}-{engine}-{batch}",
            marks=unless((i, j, k) not in quick),
        )
        for (i, strategy), (j, engine), (k, batch) in axes
    ]


def as_one_rank(dtype, engines, cases):
    """Each case and the same on one rank. They take turns in the engines, as ours reach each in one way."""
    return [
        pytest.param(
            (
                words(strategy, engine, dtype, *both, *own),
                words("local", engine, dtype, *both, *itertools.chain(*alone)),
            ),
            id=f"{engine}-{name}",
            marks=unless((i + j) % len(engines)),
        )
        for i, engine in enumerate(engines)
        for j, (name, (strategy, both, own, *alone)) in enumerate(cases.items())
        if engine != "zero3" or "dp_replicate=2" not in own
    ]


def switched(engines, dtype, *more):
    """Memory's switches against one rank without any; of each engine all at once, one by one is slow."""
    work = BATCHES["accumulated"]  # so many rows that there are several tiles
    return [
        pytest.param(
            (words("ulysses", engine, dtype, *work, *own, *more), words("local", engine, dtype, *work)),
            id=f"{engine}-{name}",
            marks=unless(name != "all"),
        )
        for engine in engines
        for name, own in SWITCHES.items()
    ]


@pytest.fixture(scope="module")
def gradients(request, launcher, tmp_path_factory):
    """What each cell that the chosen tests compare came to: a set of ranks is started once for many."""
    cells = itertools.chain.from_iterable(chosen(request, "gradients", "compared"))
    cells = {" ".join(words): tiny_cell(*RANKS, *words) for words in cells}
    return gradients_of(launcher, tmp_path_factory.mktemp("cells"), cells)


@pytest.fixture
def compared(request, gradients):
    """Loss, gradient norm and every gradient of the cells that a test compares."""
    found = [gradients[" ".join(words)] for words in request.param]
    assert all(isinstance(each, dict) for each in found), found
    return found


def compares(*cases):
    return pytest.mark.parametrize("compared", list(cases), indirect=True)


def worst_error(found, expected):
    """The largest relative error of any gradient, the loss or the norm, by Euclidean length, or nan."""
    assert found.keys() == expected.keys()
    errors = [
        np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name]) for name in expected
    ]
    return np.max(errors)  # Python's own max passes over nan


@compares(
    *grid(FLOAT32, (None, "fp32"), ("local", "fp32")),  # packages meet every engine in bf16
    *as_one_rank("fp32", ["zero3"], IN_TWO_DIMENSIONS),
    *switched(["zero3"], "fp32", "offload.optimizer=true"),
    pytest.param(
        (
            words("ulysses", "zero3", "fp32", "engine.leaf=layer", *BATCHES["accumulated"]),
            words("local", "zero3", "fp32", *BATCHES["accumulated"]),
        ),
        id="zero3-leaf",
    ),
)
def test_float32_gradients_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP32_LIMIT


@compares(
    *as_one_rank("fp64", FP64_ENGINES, ALONE),
    *as_one_rank("fp64", FP64_ENGINES, IN_TWO_DIMENSIONS),
    *switched(FP64_ENGINES, "fp64"),
)
def test_float64_gradients_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP64_LIMIT


@compares(
    *(
        pytest.param((words("ulysses", engine, "fp32", *PACKED, "data.prompt_tokens=255"),), id=engine)
        for engine in ENGINES
    )
)
def test_a_step_without_any_token_that_counts_has_no_loss_and_no_gradient(compared):
    (found,) = compared
    assert {name: np.abs(each).max() for name, each in found.items()} == dict.fromkeys(found, 0.0)


@compares(*grid(PACKAGES, (None, "bf16"), ("local", "bf16"), ("local", "fp32"), all_engines=True))
def test_bf16_gradients_err_at_most_twice_as_much_as_one_rank_does(compared):
    found, plain, exact = compared
    assert worst_error(found, exact) < max(BF16_FLOOR, 2 * worst_error(plain, exact))


@pytest.mark.parametrize("strategy", ["deepspeed_ulysses", "ring_flash_attn"])  # ulysses: test_gates
def test_a_divisor_wrong_by_sp_degree_never_becomes_a_number(launcher, tmp_path, strategy):
    words = (f"strategy={strategy}", "engine=ddp", "data.prompt_tokens=100")
    cell = tiny_cell("cluster.world_size=2", *words)
    record, _ = run_cell(launcher, cell, tmp_path, acts.divide_by_sp_degree)
    assert record.status == "wrong_result"
    assert "gradients are exactly 1/sp_degree = 0.5 times too large" in record.reason
