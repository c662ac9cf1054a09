"""What the formulas say a rank sends is what its collectives carry; of large models under ZeRO-3, nearly."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from bench.config import DTYPE_BYTES
from bench.cost.traffic import messages, payload
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from bench.training.engines.zero3.engine import zero3_config
from bench.training.engines.zero3.facts import (
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    MAX_SUB_GROUP,
    PERSISTENCE_THRESHOLD,
    REDUCE_BUCKET,
)
from bench.training.messages import ATTENTION, PARAMETERS
from bench.training.models import empty_model
from bench.training.parameters import parameters, trained_tensors
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell, raw_with
from tests.support.many_cells import look_inside, seen_inside

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


def test_zero3s_sizes_are_deepspeeds_defaults():
    """A release of DeepSpeed that changes a default changes the formulas."""
    settings = DeepSpeedZeroConfig(**zero3_config(make_cell("engine=zero3"))["zero_optimization"])
    assert settings.reduce_bucket_size == REDUCE_BUCKET
    assert settings.param_persistence_threshold == PERSISTENCE_THRESHOLD
    assert settings.max_live_parameters == MAX_LIVE_PARAMETERS
    assert settings.max_reuse_distance == MAX_REUSE_DISTANCE
    assert settings.sub_group_size == MAX_SUB_GROUP


GATHERED = {"qwen3_nano": 1, "qwen3_1_7b": 1.79, "qwen3_4b": 1.95, "llama2_7b": 1.85, "qwen3_32b": 1.97}
"""Of all weights, how many DeepSpeed 0.19's coordinator gathers in a micro-step, by a replay of its code."""


@pytest.mark.parametrize("model", GATHERED)
def test_zero3_gathers_about_as_much_as_its_coordinator_asks_for(model):
    cell = make_cell(f"model={model}", "engine=zero3", "seq_len=64k", machine=FOUR_H100)
    sent = 3 / 4 * DTYPE_BYTES[cell.dtype] * parameters(cell.model)
    assert payload(cell)[PARAMETERS] == pytest.approx(GATHERED[model] * sent, rel=0.02)


def test_nothing_is_said_of_what_has_no_formula():
    assert payload(replace(make_cell(), strategy="somebody's")) is None
    assert payload(replace(make_cell(), trainer="trl")) is None
    alone = make_cell("workload=attention", "strategy=ring", "cluster.world_size=2")
    assert {purpose for purpose, size in payload(alone).items() if size} == {"attention"}


def cell_of(values):
    """A small cell with two layers whose tensors no number of ranks divides."""
    short = {"seq_len": 256, "strategy": {"name": "ulysses"}, "measure.trace": False}
    cell = resolve(raw_with(short | values), TWO_CORES)
    return replace(cell, model=replace(cell.model, num_layers=2, hidden_size=70, vocab_size=259))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("engine", ENGINE_FACTS)
def test_every_rank_sends_what_the_formulas_say(launcher, tmp_path, engine, degree):
    """Of `ulysses` in every step of an engine; the gate of every run compares attention's bytes of all."""
    asked = [{"checkpointing": again, "grad_accum": n} for again in (False, True) for n in (1, 2)]
    asked += [{"dp_shard": 2}, {"dp_replicate": 2}]
    ranks = {"engine.name": engine, "cluster.world_size": degree}
    cells = {str(each): cell_of(each | ranks) for each in asked}
    cells = {name: cell for name, cell in cells.items() if refusal(cell) is None}
    seen = seen_inside(launcher, tmp_path, cells, partial(look_inside, before=2))
    wrong = {name: [*different(cell, seen[name])] for name, cell in cells.items()}
    assert {name: reasons for name, reasons in wrong.items() if reasons} == {}


def different(cell, ranks):
    """What each rank counted and the formula does not say: bytes by purpose, and calls beside attention's."""
    if isinstance(ranks, str):
        yield ranks
        return
    # ZeRO-3 gathers several parameters at once.
    not_compared = ("attention", *([PARAMETERS] if cell.engine.name == "zero3" else []))
    calls = Counter()
    for each in messages(cell):
        if each.purpose not in not_compared:
            calls[f"{each.purpose} {each.exchange.kind}"] += each.count
    for rank, seen in enumerate(ranks):
        sent = dict.fromkeys(payload(cell), 0) | seen["sent_bytes"]
        own = STRATEGIES[cell.strategy].rank_communication_bytes(cell, rank % cell.sp_degree)
        expected = payload(cell) | {ATTENTION: own}
        if sent != expected:
            yield f"rank {rank} sent {sent}, not {expected}"
        made = {name: count for name, count in seen["calls"].items() if not name.startswith(not_compared)}
        if made != calls and len(ranks) > 1:  # one rank alone calls as well, and nothing is sent
            yield f"rank {rank} made {made}, not {dict(calls)}"
