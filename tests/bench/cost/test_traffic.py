"""Payload of the formulas against that of a rank's collectives, and of ZeRO-3 for large models."""

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
from tests.support.many_cells import look_inside, results_of_cells

NANO = make_cell("model=qwen3_nano").model
MODELS = {
    "tied, with norms of heads": NANO,
    "untied": replace(NANO, tied_embeddings=False),
    "with biases": replace(NANO, family="qwen2", attention_bias=True),
    "without either": replace(NANO, family="llama"),
}


@pytest.mark.parametrize("name", MODELS)
def test_trained_tensors_match_transformers_parameters(name):
    model = replace(MODELS[name], num_layers=2, hidden_size=72)
    theirs = empty_model(model, attention_name="sdpa", max_positions=64).parameters()
    ours = trained_tensors(model)
    assert Counter((tensor.rows, tensor.count) for tensor in ours) == Counter(
        (p.shape[0], p.numel()) for p in theirs
    )
    assert sum(tensor.count for tensor in ours) == parameters(model)


def test_zero3_sizes_are_deepspeeds_defaults():
    """If a release of DeepSpeed changes a default, the formulas must change."""
    settings = DeepSpeedZeroConfig(**zero3_config(make_cell("engine=zero3"))["zero_optimization"])
    assert settings.reduce_bucket_size == REDUCE_BUCKET
    assert settings.param_persistence_threshold == PERSISTENCE_THRESHOLD
    assert settings.max_live_parameters == MAX_LIVE_PARAMETERS
    assert settings.max_reuse_distance == MAX_REUSE_DISTANCE
    assert settings.sub_group_size == MAX_SUB_GROUP


GATHERED = {"qwen3_nano": 1, "qwen3_1_7b": 1.79, "qwen3_4b": 1.95, "llama2_7b": 1.85, "qwen3_32b": 1.97}
"""Share of the weights that DeepSpeed 0.19's coordinator gathers in a micro-step, by a replay of its code."""


@pytest.mark.parametrize("model", GATHERED)
def test_zero3_payload_matches_deepspeeds_coordinator(model):
    cell = make_cell(f"model={model}", "engine=zero3", "seq_len=64k", machine=FOUR_H100)
    sent = 3 / 4 * DTYPE_BYTES[cell.dtype] * parameters(cell.model)
    assert payload(cell)[PARAMETERS] == pytest.approx(GATHERED[model] * sent, rel=0.02)


def test_payload_is_none_without_a_formula():
    assert payload(replace(make_cell(), strategy="somebody's")) is None
    assert payload(replace(make_cell(), trainer="trl")) is None
    alone = make_cell("workload=attention", "strategy=ring", "cluster.world_size=2")
    assert {purpose for purpose, size in payload(alone).items() if size} == {"attention"}


def cell_of(values):
    """Small cell with two layers, whose tensors cannot be divided evenly among ranks."""
    short = {"seq_len": 256, "strategy": {"name": "ulysses"}, "measure.trace": False}
    cell = resolve(raw_with(short | values), TWO_CORES)
    return replace(cell, model=replace(cell.model, num_layers=2, hidden_size=70, vocab_size=259))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("engine", ENGINE_FACTS)
def test_every_rank_sends_the_bytes_and_messages_of_the_formula(launcher, tmp_path, engine, degree):
    """`ulysses` with every engine; the gate of every run compares attention's bytes of all strategies."""
    settings = [{"checkpointing": value, "grad_accum": n} for value in (False, True) for n in (1, 2)]
    settings += [{"dp_shard": 2}, {"dp_replicate": 2}]
    ranks = {"engine.name": engine, "cluster.world_size": degree}
    cells = {str(values): cell_of(values | ranks) for values in settings}
    cells = {name: cell for name, cell in cells.items() if refusal(cell) is None}
    seen = results_of_cells(launcher, tmp_path, cells, partial(look_inside, before=2))
    wrong = {name: [*differences(cell, seen[name])] for name, cell in cells.items()}
    assert {name: reasons for name, reasons in wrong.items() if reasons} == {}


def differences(cell, ranks):
    """Differences between a rank's counts and the formula: bytes by purpose, calls outside of attention."""
    if isinstance(ranks, str):
        yield ranks
        return
    # ZeRO-3 gathers several parameters at once.
    not_compared = ("attention", *([PARAMETERS] if cell.engine.name == "zero3" else []))
    calls = Counter()
    for message in messages(cell):
        if message.purpose not in not_compared:
            calls[f"{message.purpose} {message.communication.kind}"] += message.count
    for rank, counted in enumerate(ranks):
        sent = dict.fromkeys(payload(cell), 0) | counted["sent_bytes"]
        own = STRATEGIES[cell.strategy].rank_communication_bytes(cell, rank % cell.sp_degree)
        expected = payload(cell) | {ATTENTION: own}
        if sent != expected:
            yield f"rank {rank} sent {sent}, not {expected}"
        made = {name: count for name, count in counted["calls"].items() if not name.startswith(not_compared)}
        if made != calls and len(ranks) > 1:  # a single rank calls collectives but sends nothing
            yield f"rank {rank} made {made}, not {dict(calls)}"
