"""`bench.probe` finds effects across documents and of later tokens, by kind of layer and over ranks."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bench
from bench.extras.probe.leak_probe import Moved, choose_changes
from tests.support.cells import make_cell
from tests.support.many_cells import built_workloads, results_of_cells
from tests.support.scripts.own_loop import NUMBERS

TOKENS = 32
SHARDED = (
    "strategy=ring", "layout=zigzag", "engine=ddp", "dtype=fp32", "data=synthetic", "data.packing=documents",
    "seq_len=64", "batch=2", "cluster.world_size=2",
)  # fmt: skip


def probe_packed(family, **settings):
    """Return the counts of a small model of four packed documents."""
    config = AutoConfig.for_model(family, **NUMBERS, pad_token_id=None, **settings)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    documents = torch.arange(4).repeat_interleave(8)[None]
    positions = torch.arange(8).repeat(4)[None]  # transformers finds packed documents by restarting positions
    return bench.probe(model, torch.arange(TOKENS)[None], documents, position_ids=positions)


def test_sound_attention_moves_only_later_outputs_of_a_document():
    changes = ([0, 0, 24, 0, 8 - later, later, later] for later in (8, 4, 1))  # first, middle, last
    of_model = [4 * sum(counts) for counts in zip(*changes, strict=True)]
    moved = probe_packed("llama")
    assert moved == {"model": Moved(*of_model), "full_attention": Moved(*(2 * n for n in of_model))}


def test_probe_tells_a_leaking_layer_from_sound_attention():
    moved = probe_packed("lfm2", block_ff_dim=32, layer_types=["conv", "full_attention"])
    assert set(moved) == {"model", "conv", "full_attention"}
    for kind in ("model", "conv"):
        assert min(moved[kind].other_outputs, moved[kind].other_gradients) > 0
    assert moved["model"].other_gradients > moved["model"].other_outputs  # gradients also leak backwards
    attention = moved["full_attention"]
    assert (attention.other_outputs, attention.other_gradients, attention.earlier_outputs) == (0, 0, 0)
    assert attention.own_outputs == attention.own_positions


def test_changes_are_in_spread_documents_and_in_the_longest():
    sizes = [1, 3, 5, 2, 2, 1, 10, 8]
    documents = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[None]
    changes = choose_changes(documents, torch.arange(TOKENS)[None])
    assert changes == [
        (0, 0), (2, 4), (2, 6), (2, 8), (5, 13), (6, 14), (6, 19), (6, 23), (7, 24), (7, 28), (7, 31),
    ]  # fmt: skip


def probe_shards(job, log):
    """Probe this rank's shard in every cell, whose name says what the strategy does wrong."""
    results = {}
    for name, workload in built_workloads(job, log):
        strategy, tokens = workload.rank.strategy, workload.rank.strategy.cell.seq_len
        if name == "no mask":
            strategy.use_documents = lambda _: nullcontext()
        if name == "looks ahead":
            strategy.attention = partial(attend_to_next, strategy.attention)
        whole = workload.trainer.data.micro_batch(0, 0, 0, tokens)
        documents = (whole.position_ids == 0).flatten().cumsum(0).view_as(whole.position_ids)
        positions = torch.arange(tokens).expand_as(documents)
        batch, places = strategy.shard(whole), replace(whole, input_ids=documents, labels=positions)
        local, group = strategy.shard(places), strategy.groups.sequence
        model, named = workload.network.model, {"position_ids": batch.position_ids}
        with strategy.step(batch):
            moved = bench.probe(model, batch.input_ids, local.input_ids, local.labels, group, **named)
        compared = len(choose_changes(documents, positions)) * documents.numel()
        results[name] = {"compared": compared, "moved": {kind: asdict(part) for kind, part in moved.items()}}
    return {"results": results}


def attend_to_next(attention, q, k, v, *, causal=True):
    return attention(q, k, v, causal=causal) + 1e-3 * q.roll(-1, dims=2)


@pytest.mark.ranks
def test_probe_sums_over_two_ranks_and_finds_their_leaks(launcher, tmp_path):
    names = ("right", "no mask", "looks ahead")
    results = results_of_cells(launcher, tmp_path, dict.fromkeys(names, make_cell(*SHARDED)), probe_shards)
    assert all(first == second for first, second in results.values())
    for kind in ("model", "full_attention"):
        right, unmasked, ahead = (Moved(**results[name][0]["moved"][kind]) for name in names)
        assert (right.other_outputs, right.other_gradients, right.earlier_outputs) == (0, 0, 0)
        compared = right.other_positions + right.earlier_positions + right.own_positions
        assert compared == results["right"][0]["compared"]
        assert right.own_positions >= right.own_outputs > 0.9 * right.own_positions
        assert min(unmasked.other_outputs, unmasked.other_gradients) > 0 == unmasked.earlier_outputs
        assert ahead.earlier_outputs > 0
