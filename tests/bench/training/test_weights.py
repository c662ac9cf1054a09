"""Every engine shards the same weights as one device holds, and never has the whole model on the way."""

import gc
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from bench.config import Cell
from bench.measure.memory.trackers import AllocationTracker
from bench.measure.workloads.train import TrainWorkload
from bench.measure.workloads.workload import Rank
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, runnable
from bench.training.models import build_model
from bench.training.parameters import head_parameters, layer_parameters, matrix_parameters
from tests.support.cells import tiny_cell

DEEP = {"num_layers": 6, "hidden_size": 64, "intermediate_size": 1024}
SHARDED = {
    1: ("engine=zero3",),
    4: (
        "engine=ddp dp_shard=4",
        "engine=fsdp2 dp_replicate=4",
        "engine=fsdp2 dp_replicate=2 dp_shard=2",
        "engine=fsdp2 dp_shard=4",
        "engine=zero3 dp_shard=4",
    ),
}
"""By ranks; ZeRO-3 is last, because it changes what it touches. It shards over all ranks."""


def deep_cell(ranks, words):
    """Many layers, so that one of them is little of the whole; tied where parameters have replicas."""
    cell = tiny_cell("strategy=local", "data=synthetic", f"cluster.world_size={ranks}", *words.split())
    return replace(cell, model=replace(cell.model, **DEEP, tied_embeddings=cell.dp_shard != 2))


def build_each(job, log):
    """A rank's whole life: of each cell, what building it took and what is not as built whole."""
    device, found, whole = join(job), {}, cache(_built_whole)
    for words, fields in json.loads((job.folder / "cells.json").read_text()).items():
        cell = Cell.from_flat(fields)
        strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        with strategy.install() as wiring:
            workload, peak_bytes = _built(Rank(strategy, wiring, device, log.step))
            found[words] = {"peak_bytes": peak_bytes, **_compared(workload, cell, whole(cell.model))}
            del workload
    finish_together(device)
    return {"found": found}


def _built(rank):
    """The workload, and the bytes that building took until DeepSpeed made the optimizer's state."""
    import deepspeed

    gc.collect()
    initialize, before = deepspeed.initialize, []

    def noting(**keywords):
        before.append(tracker.peak_bytes)
        return initialize(**keywords)

    deepspeed.initialize = noting
    with AllocationTracker() as tracker:
        start = tracker.peak_bytes
        workload = TrainWorkload(rank)
    deepspeed.initialize = initialize
    return workload, (*before, tracker.peak_bytes)[0] - start


def _built_whole(model):
    return build_model(model, attention_name="sdpa", max_positions=256, seed=0)


def _compared(workload, cell, plain):
    """What of the engine's model is not as in one built whole, and whether head and embedding are tied."""
    from deepspeed.utils import safe_get_full_fp32_param

    whole = {
        "ddp": lambda parameter: parameter,
        "fsdp2": lambda parameter: parameter.full_tensor(),
        "zero3": safe_get_full_fp32_param,
    }[cell.engine.name]
    dtype = torch.bfloat16 if cell.engine.name == "zero3" else torch.float32
    module = workload.trainer.engine.module
    while hasattr(module, "module"):
        module = module.module
    held = {name: whole(parameter) for name, parameter in module.model.named_parameters()}
    held |= dict(module.model.named_buffers())
    rounded = {name: each.to(dtype).float() for name, each in plain.named_parameters()}
    expected = rounded | dict(plain.named_buffers())
    wrong = sorted(held.keys() ^ expected.keys())
    wrong += [name for name, each in expected.items() if not torch.equal(held[name], each)]
    gathering = [getattr(parameter, "ds_process_group", None) for parameter in module.parameters()]
    return {
        "on_default_group": dist.group.WORLD in gathering,
        "wrong": wrong,
        "tied": module.model.lm_head.weight is module.model.model.embed_tokens.weight,
    }


def _bound_bytes(cell):
    """This rank's shards and a layer and a half in float32; ZeRO-3's shards are in bf16."""
    model = cell.model
    shards = cell.cluster.world_size if cell.engine.name == "zero3" else cell.dp_shard
    layer = layer_parameters(model) // model.num_layers
    whole = matrix_parameters(model) + (0 if model.tied_embeddings else head_parameters(model))
    return whole * (2 if cell.engine.name == "zero3" else 4) // shards + 4 * layer * 3 // 2


@pytest.mark.parametrize("ranks", SHARDED)
def test_engines_hold_the_weights_of_one_device_and_load_no_more_than_shards_and_a_layer(
    launcher, tmp_path, ranks
):
    cells = {words: deep_cell(ranks, words) for words in SHARDED[ranks]}
    (tmp_path / "cells.json").write_text(json.dumps({name: cell.flat() for name, cell in cells.items()}))
    ends = launcher.run(next(iter(cells.values())), tmp_path, entry=build_each)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    for found in (end.report["found"] for end in ends):
        assert {words: each["wrong"] for words, each in found.items()} == {words: [] for words in cells}
        assert not any(each["on_default_group"] for each in found.values())
        assert {words: each["tied"] for words, each in found.items()} == {
            words: cell.model.tied_embeddings for words, cell in cells.items()
        }
        beyond = {
            words: (found[words]["peak_bytes"], _bound_bytes(cell))
            for words, cell in cells.items()
            if cell.engine.name != "ddp" and found[words]["peak_bytes"] > _bound_bytes(cell)
        }
        assert beyond == {}
