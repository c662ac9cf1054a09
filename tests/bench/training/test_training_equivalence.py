"""Every strategy trains the same objective as one rank does: loss, gradient norm, every gradient."""

import itertools

import numpy as np
import pytest

from bench.request.legality import ENGINE_DTYPES
from bench.strategies import STRATEGIES
from tests import faults
from tests.cells import run_cell, tiny_cell, words_for
from tests.installed import INSTALLED
from tests.together import chosen, gradients_of

FP64_LIMIT = 1e-12
FP32_LIMIT = 1e-6
"""ZeRO-3 knows no float64; the two others are held to 1e-12 there."""
BF16_FLOOR = 2e-2
ENGINES = sorted(ENGINE_DTYPES)
FP64_ENGINES = [engine for engine in ENGINES if "fp64" in ENGINE_DTYPES[engine]]
PARALLEL = [name for name in INSTALLED if STRATEGIES[name].shares_sequences]
SWITCHES = {
    "tiled_mlp": ("tiled_mlp=true",),
    "tiled_mlp, checkpointed": ("tiled_mlp=true", "checkpointing=true"),
    "offload.activations": ("offload.activations=true", "checkpointing=true"),
    "all": ("tiled_mlp=true", "checkpointing=true", "offload.activations=true"),
}
IN_DEEPSPEED = {name: (*switches, "offload.optimizer=true") for name, switches in SWITCHES.items()}
PACKAGES = [name for name in PARALLEL if STRATEGIES[name].package is not None]
FLOAT32 = [name for name in PARALLEL if "fp32" in STRATEGIES[name].dtypes]
BATCHES = {
    "all tokens count": (),
    "uneven, one rank with none": ("data.prompt_tokens=150",),
    "accumulated": ("grad_accum=2", "batch=2"),
}
PACKED = ("data=synthetic", "data.packing=documents")
"""Boundaries anywhere in a shard, and documents of one token."""
MOST_RANKS_WITHOUT_A_TOKEN = (*PACKED, "data.prompt_tokens=64")
GRIDS = {
    "2x1x2": ("ring", ("dp_replicate=2", "sp_degree=2"), 2),
    "1x2x2": ("ulysses", ("dp_shard=2", "sp_degree=2"), 2),
    "1x1x4": ("usp", ("sp_degree=4",), 1),
    "1x4x1": ("ring", ("dp_shard=4", "sp_degree=1"), 4),
}
"""dp_replicate x dp_shard x sp_degree, a strategy to run it with, and how many sequences a step has."""
TWO_DIMENSIONAL = ("usp",)
RING_LAYOUTS = STRATEGIES["ring"].layouts
UNEVEN = BATCHES["uneven, one rank with none"]
RANKS = ("cluster.world_size=4", "measure.gradients=true")


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


def in_float64(*ways):
    """Each way, a strategy and more words, under an engine that knows float64, and the same on one rank.

    They take turns in the engines, as ours reach each in one and the same way; the others are slow.
    """
    return [
        pytest.param(
            (words(strategy, engine, "fp64", *UNEVEN, *more), words("local", engine, "fp64", *UNEVEN)),
            id="-".join((strategy, engine, *more)),
            marks=unless((i + j) % len(FP64_ENGINES)),
        )
        for i, engine in enumerate(FP64_ENGINES)
        for j, (strategy, *more) in enumerate(ways)
    ]


def packed_in_float64(strategy, *more, slow_under=()):
    """Packed documents under each engine that knows float64, and the same on one rank."""
    return [
        pytest.param(
            (
                words(strategy, engine, "fp64", *PACKED, "batch=2", *more),
                words("local", engine, "fp64", *PACKED, "batch=2"),
            ),
            id="-".join((strategy, engine, *more)),
            marks=unless(engine in slow_under),
        )
        for engine in FP64_ENGINES
    ]


def in_two_dimensions(engines, dtype):
    """Each grid of ranks under each engine that can replicate as it asks, and the same on one rank.

    Each under one engine, the others are slow.
    """
    return [
        pytest.param(
            (
                words(strategy, engine, dtype, *MOST_RANKS_WITHOUT_A_TOKEN, *degrees),
                words("local", engine, dtype, *MOST_RANKS_WITHOUT_A_TOKEN, f"grad_accum={sequences}"),
            ),
            id=f"{grid}-{engine}",
            marks=unless((i + j) % len(engines)),
        )
        for i, engine in enumerate(engines)
        for j, (grid, (strategy, degrees, sequences)) in enumerate(GRIDS.items())
        if engine != "zero3" or "dp_replicate=2" not in degrees
    ]


def switched(engines, dtype, switches):
    """Memory's switches against one rank without any; of each engine all at once, one by one is slow."""
    work = BATCHES["accumulated"]  # so many rows that there are several tiles
    return [
        pytest.param(
            (words("ulysses", engine, dtype, *work, *switches[name]), words("local", engine, dtype, *work)),
            id=f"{engine}-{name}",
            marks=() if name == "all" else pytest.mark.slow,
        )
        for engine in engines
        for name in switches
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


@compares(*grid(FLOAT32, (None, "fp32"), ("local", "fp32")))  # packages meet every engine in bf16
def test_float32_gradients_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP32_LIMIT


@compares(*in_float64(*(("ring", f"layout={layout}") for layout in RING_LAYOUTS)))
def test_float64_gradients_of_the_ring_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP64_LIMIT


@compares(*in_float64(("distflash_attn", "checkpointing=true", "strategy.checkpoints=attention_output")))
def test_float64_gradients_with_kept_outputs_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP64_LIMIT


@compares(*in_float64(("ulysses",), ("ulysses_chunked",), ("usp",)))
def test_float64_gradients_of_shared_heads_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP64_LIMIT


@compares(
    *packed_in_float64("ring"),
    *packed_in_float64("ring", "layout=contiguous", slow_under=("fsdp2",)),
    *packed_in_float64("ring", "layout=striped", slow_under=("ddp",)),
    *packed_in_float64("ulysses", slow_under=("ddp",)),
    *packed_in_float64("usp", slow_under=("fsdp2",)),
    *in_two_dimensions(FP64_ENGINES, "fp64"),
)
def test_float64_gradients_of_packed_documents_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP64_LIMIT


@compares(
    *(
        pytest.param(
            (
                words("ring", engine, "fp64", "seq_len=250", "pad=true", *more),
                words("local", engine, "fp64", "seq_len=250", *more),
            ),
            id="-".join((engine, *more)),
        )
        for engine, more in zip(FP64_ENGINES, (PACKED, ()), strict=True)
    )
)
def test_padding_leaves_the_gradients_as_they_are(compared):
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


@compares(*in_two_dimensions(["zero3"], "fp32"))
def test_float32_gradients_of_packed_documents_equal_those_of_one_rank(compared):
    assert worst_error(*compared) < FP32_LIMIT


@compares(*switched(FP64_ENGINES, "fp64", SWITCHES))
def test_float64_gradients_with_memory_s_switches_equal_those_without(compared):
    assert worst_error(*compared) < FP64_LIMIT


@compares(*switched(["zero3"], "fp32", IN_DEEPSPEED))
def test_gradients_of_zero3_with_memory_s_switches_equal_those_without(compared):
    assert worst_error(*compared) < FP32_LIMIT


@compares(*grid(PACKAGES, (None, "bf16"), ("local", "bf16"), ("local", "fp32"), all_engines=True))
def test_bf16_gradients_err_at_most_twice_as_much_as_one_rank_does(compared):
    found, plain, exact = compared
    assert worst_error(found, exact) < max(BF16_FLOOR, 2 * worst_error(plain, exact))


@compares(
    *(
        pytest.param(
            (
                words("ulysses", engine, "fp32", "sp_degree=2", "dp_shard=2", "data.prompt_tokens=150"),
                words("local", engine, "fp32", "grad_accum=2", "data.prompt_tokens=150"),
            ),
            id=engine,
        )
        for engine in ENGINES
    )
)
def test_two_sequence_groups_train_the_same_step_as_accumulation_does(compared):
    assert worst_error(*compared) < FP32_LIMIT


@compares(
    (
        words("ulysses", "fsdp2", "fp32", "sp_degree=2", "dp_replicate=2"),
        words("local", "fsdp2", "fp32", "grad_accum=2"),
    )
)
def test_replicated_shards_train_the_same_step_as_accumulation_does(compared):
    assert worst_error(*compared) < FP32_LIMIT


@pytest.mark.parametrize("strategy", ["deepspeed_ulysses", "ring_flash_attn"])  # ulysses: test_gates
def test_a_divisor_wrong_by_sp_degree_never_becomes_a_number(launcher, tmp_path, strategy):
    words = (f"strategy={strategy}", "engine=ddp", "data.prompt_tokens=100")
    cell = tiny_cell("cluster.world_size=2", *words)
    record, _ = run_cell(launcher, cell, tmp_path, faults.divide_by_sp_degree)
    assert record.status == "wrong_result"
    assert "gradients are exactly 1/sp_degree = 0.5 times too large" in record.reason
