"""What the formulas say a rank sends is what its collectives carry, for every purpose."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from bench.cost import gathering
from bench.cost.gathering import gathered_ahead, gathered_together, stays_whole
from bench.cost.tensors import TrainedTensor, trained_tensors
from bench.cost.traffic import ATTENTION, messages, payload, reduced_at_once
from bench.cost.weights import parameters
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.training.engines import _zero3_config
from bench.training.models import empty_model
from tests.cells import FOUR_H100, TWO_CORES, make_cell, raw_with, tiny_cell, variants
from tests.together import look_inside_the_third_step, seen_inside

NANO = make_cell("model=qwen3_nano").model
MODELS = {
    "tied, with norms of heads": NANO,
    "untied": replace(NANO, tied_embeddings=False),
    "with biases": replace(NANO, family="qwen2", attention_bias=True),
    "without either": replace(NANO, family="llama"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_of_transformers(name):
    model = replace(MODELS[name], num_layers=2, hidden_size=72)
    found = empty_model(model, attention_name="sdpa", max_positions=64).parameters()
    ours = trained_tensors(model)
    assert Counter((each.rows, each.count) for each in ours) == Counter(
        (p.shape[0], p.numel()) for p in found
    )
    assert sum(each.count for each in ours) == parameters(model)


def test_zero3s_sizes_are_those_of_the_engine():
    cell = make_cell("model=qwen3_4b")
    zero3 = _zero3_config(cell)["zero_optimization"]
    assert zero3["reduce_bucket_size"] == reduced_at_once(cell)
    assert zero3["stage3_prefetch_bucket_size"] == gathered_ahead(cell.model)
    whole = zero3["stage3_param_persistence_threshold"]
    assert [stays_whole(cell.model, TrainedTensor("", whole + more)) for more in (0, 1)] == [True, False]


def test_a_small_model_is_gathered_once_a_micro_step_and_a_large_one_nearly_twice():
    small = Counter(
        each for together in gathered_together(make_cell("model=qwen3_nano")) for each in together
    )
    assert {*small.values()} == {1}
    large = make_cell("model=qwen3_4b", "seq_len=64k", machine=FOUR_H100)
    gathered = sum(tensor.count for together in gathered_together(large) for tensor in together)
    assert 1.9 < gathered / parameters(large.model) < 2


def test_nothing_is_said_of_what_has_no_formula():
    assert payload(replace(make_cell(), strategy="somebody's")) is None
    assert payload(replace(make_cell(), trainer="trl")) is None
    alone = make_cell("workload=attention", "strategy=ring", "cluster.world_size=2")
    assert {purpose for purpose, size in payload(alone).items() if size} == {"attention"}


ENGINES = ("ddp", "fsdp2", "zero3")
HEADS_4_TO = (4, 2, 1)
REPEATS = [*itertools.product((False, True), (1, 2))]
"""Checkpointing and micro-steps: each cell of the grid has one of them, each engine with each degree all."""


def grid(engine, degree):
    """Every strategy, layout and ratio of heads that goes with them, by name."""
    turns = itertools.cycle(REPEATS)
    for (name, facts), kv_heads in itertools.product(STRATEGIES.items(), HEADS_4_TO):
        for layout, options in variants(facts):
            checkpointing, micro_steps = next(turns)
            cell = cell_of(
                {"strategy": {"name": name, **dict(options)}, "layout": layout, "engine.name": engine,
                 "cluster.world_size": degree, "checkpointing": checkpointing, "grad_accum": micro_steps}
            )  # fmt: skip
            cell = replace(cell, model=replace(cell.model, num_kv_heads=kv_heads))
            if refusal(cell) is None:
                yield f"{name} {layout} {options} 4:{kv_heads} {checkpointing} {micro_steps}", cell
    for key in ("dp_shard", "dp_replicate"):
        cell = cell_of({"engine.name": engine, "cluster.world_size": degree, key: 2})
        if refusal(cell) is None:
            yield key, cell


def cell_of(values):
    """A small cell with two layers whose tensors no number of ranks divides."""
    short = {"seq_len": 256, "strategy": {"name": "ulysses"}, "measure.trace": False}
    cell = resolve(raw_with(short | values), TWO_CORES)
    return replace(cell, model=replace(cell.model, num_layers=2, hidden_size=70, vocab_size=259))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_rank_sends_what_the_formulas_say(launcher, tmp_path, engine, degree):
    cells = dict(grid(engine, degree))
    seen = seen_inside(launcher, tmp_path, cells, look_inside_the_third_step)
    wrong = {name: [*different(cell, seen[name])] for name, cell in cells.items()}
    assert {name: reasons for name, reasons in wrong.items() if reasons} == {}


@pytest.mark.slow
@pytest.mark.parametrize("distance", [30_000, 100_000, 250_000])
def test_zero3_gathers_again_what_is_far(launcher, tmp_path, monkeypatch, distance):
    """Of the nano model's six layers, some are near and some are far, as of a large model's."""
    monkeypatch.setattr(gathering, "MAX_LIVE_PARAMETERS", distance)
    cells = {
        f"{checkpointing} {loss} {seq_len}": tiny_cell(
            "cluster.world_size=2", "strategy=ulysses", "engine=zero3", f"checkpointing={checkpointing}",
            f"loss={loss}", f"seq_len={seq_len}",
        )
        for checkpointing, loss, seq_len in (("false", "chunked", "256"), ("true", "untiled", "256"),
                                             ("true", "chunked", "4k"))
    }  # fmt: skip
    cells = {name: replace(cell, model=replace(cell.model, num_layers=6)) for name, cell in cells.items()}
    seen = seen_inside(launcher, tmp_path, cells, look_inside_the_third_step, reuse_distance=distance)
    forget_formulas()
    wrong = {name: [*different(cell, seen[name])] for name, cell in cells.items()}
    forget_formulas()
    assert {name: reasons for name, reasons in wrong.items() if reasons} == {}


def forget_formulas():
    """They are kept by cell, which does not hold DeepSpeed's constants."""
    gathered_together.cache_clear()
    messages.cache_clear()


def different(cell, ranks):
    """What each rank counted and the formula does not say: bytes by purpose, and calls beside attention's."""
    if isinstance(ranks, str):
        yield ranks
        return
    calls = Counter()
    for each in messages(cell):
        calls[f"{each.purpose} {each.exchange.kind}"] += each.count
    for rank, seen in enumerate(ranks):
        sent = dict.fromkeys(payload(cell), 0) | seen["sent_bytes"]
        own = STRATEGIES[cell.strategy].rank_exchange_bytes(cell, rank % cell.sp_degree)
        expected = payload(cell) | {ATTENTION: own}
        if sent != expected:
            yield f"rank {rank} sent {sent}, not {expected}"
        made = {name: count for name, count in seen["calls"].items() if not name.startswith("attention")}
        if made != calls and len(ranks) > 1:  # one rank alone calls as well, and nothing is sent
            yield f"rank {rank} made {made}, not {dict(calls)}"
