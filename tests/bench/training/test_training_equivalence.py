"""Every strategy has the loss, the gradient norm and the gradients of one rank."""

import itertools

import numpy as np
import pytest

from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from tests.support.cells import INSTALLED, run_cell, tiny_cell, words_for
from tests.support.faults import acts
from tests.support.many_cells import gradients_of, selected_params

FP64_LIMIT = 1e-12
FP32_LIMIT = 1e-6
"""Limit in float32, for ZeRO-3, which has no float64; the other engines have FP64_LIMIT in float64."""
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
"""Words for documents with boundaries anywhere in a shard, some of them of one token."""
GRIDS = {
    "2x1x2": ("ring", ("dp_replicate=2", "sp_degree=2"), 2),
    "1x2x2": ("ulysses", ("dp_shard=2", "sp_degree=2"), 2),
    "1x1x4": ("usp", ("sp_degree=4",), 1),
    "1x4x1": ("ring", ("dp_shard=4", "sp_degree=1"), 4),
}
"""Strategy, words and sequences per step by dp_replicate x dp_shard x sp_degree."""
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
"""Strategy, words that it shares with one rank, and words only for the strategy."""
IN_TWO_DIMENSIONS = {
    grid: (strategy, (*PACKED, "data.prompt_tokens=64"), degrees, (f"grad_accum={sequences}",))
    for grid, (strategy, degrees, sequences) in GRIDS.items()
}
"""Entries as in ALONE, with words only for one rank, which accumulates the sequences of all ranks. Most ranks
hold no token that counts."""
RANKS = ("cluster.world_size=4", "model=qwen3_nano", "model.intermediate_size=1600")
"""Words for a model whose MLP ZeRO-3 shards; it shards no weight of fewer than 100,000 elements."""


def words(strategy, engine, dtype, *more, heads_of=None):
    """Return the words of a cell, with the heads that the strategy `heads_of` needs."""
    heads = words_for(heads_of or strategy)
    return (f"strategy={strategy}", f"engine={engine}", f"dtype={dtype}", *heads, *more)


def ranks(strategy):
    """Return the words for the smallest number of ranks with every kind of neighbour of the strategy."""
    return () if strategy in TWO_DIMENSIONAL else ("cluster.world_size=2",)


def slow_if(is_slow):
    return pytest.mark.slow if is_slow else ()


def grid(strategies, *compared, all_engines=False):
    """Return the cases of strategy x engine x batch, most of them marked as slow.

    `compared` are the cells of a case: the strategy, None for that of the case, and the dtype. Two ranks show
    any mistake of an engine and a strategy together; `test_strategies` has four. Without `all_engines`, the
    cases that are not slow have one engine per strategy.
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
            marks=slow_if((i, j, k) not in quick),
        )
        for (i, strategy), (j, engine), (k, batch) in axes
    ]


def as_one_rank(dtype, engines, cases):
    """Return pairs of a case and the same cell on one rank; one engine per case is not slow.

    That is enough, because our strategies use all engines in the same way.
    """
    return [
        pytest.param(
            (
                words(strategy, engine, dtype, *both, *own),
                words("local", engine, dtype, *both, *itertools.chain(*alone)),
            ),
            id=f"{engine}-{name}",
            marks=slow_if((i + j) % len(engines)),
        )
        for i, engine in enumerate(engines)
        for j, (name, (strategy, both, own, *alone)) in enumerate(cases.items())
    ]


def switched(engines, dtype, *more):
    """Return pairs of a cell that saves memory and one rank that does not; single switches are slow."""
    work = BATCHES["accumulated"]  # enough rows for several tiles
    return [
        pytest.param(
            (words("ulysses", engine, dtype, *work, *own, *more), words("local", engine, dtype, *work)),
            id=f"{engine}-{name}",
            marks=slow_if(name != "all"),
        )
        for engine in engines
        for name, own in SWITCHES.items()
    ]


@pytest.fixture(scope="module")
def gradients(request, launcher, tmp_path_factory):
    """Gradients of every cell that the selected tests compare; ranks are started once for many cells."""
    cells = itertools.chain.from_iterable(selected_params(request, "gradients", "compared"))
    cells = {" ".join(words): tiny_cell(*RANKS, *words) for words in cells}
    return gradients_of(launcher, tmp_path_factory.mktemp("cells"), cells)


@pytest.fixture
def compared(request, gradients):
    """Loss, gradient norm and every gradient of the cells that a test compares."""
    results = [gradients[" ".join(words)] for words in request.param]
    assert all(isinstance(result, dict) for result in results), results
    return results


def compares(*cases):
    return pytest.mark.parametrize("compared", list(cases), indirect=True)


def worst_error(actual, expected):
    """Return the largest relative error (Euclidean norm) of any gradient, the loss and the norm; or nan."""
    assert actual.keys() == expected.keys()
    errors = [
        np.linalg.norm(actual[name] - expected[name]) / np.linalg.norm(expected[name]) for name in expected
    ]
    return np.max(errors)  # Python's max may skip nan


@compares(
    *grid(FLOAT32, (None, "fp32"), ("local", "fp32")),  # packages run with all engines in bf16
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
def test_step_without_counted_tokens_has_zero_gradients(compared):
    (values,) = compared
    assert {name: np.abs(value).max() for name, value in values.items()} == dict.fromkeys(values, 0.0)


@compares(*grid(PACKAGES, (None, "bf16"), ("local", "bf16"), ("local", "fp32"), all_engines=True))
def test_bf16_gradient_error_is_at_most_twice_that_of_one_rank(compared):
    actual, plain, exact = compared
    assert worst_error(actual, exact) < max(BF16_FLOOR, 2 * worst_error(plain, exact))


@pytest.mark.parametrize("strategy", ["deepspeed_ulysses", "ring_flash_attn"])  # ulysses: test_gates
def test_gradient_divisor_wrong_by_sp_degree_is_found(launcher, tmp_path, strategy):
    words = (f"strategy={strategy}", "engine=ddp", "data.prompt_tokens=100")
    cell = tiny_cell("cluster.world_size=2", *words)
    record, _ = run_cell(launcher, cell, tmp_path, acts.divide_by_sp_degree)
    assert record.status == "wrong_result"
    assert "gradients are exactly 1/sp_degree = 0.5 times too large" in record.reason
