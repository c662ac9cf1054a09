"""Engines shard the weights that one device would hold, without building the whole model on a rank."""

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
from bench.measure.workloads.workload import WorkloadRank
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class
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
"""Words of the cells by the number of ranks. ZeRO-3, which shards over all ranks, is last because it leaves
changes in the process."""


def deep_cell(ranks, words):
    """Return a cell whose layers are small parts of the model; embeddings are tied unless `dp_shard` is 2."""
    cell = tiny_cell("strategy=local", "data=synthetic", f"cluster.world_size={ranks}", *words.split())
    return replace(cell, model=replace(cell.model, **DEEP, tied_embeddings=cell.dp_shard != 2))


def build_cells(job, log):
    """Build all cells on a rank; report the memory that building took, and the weights that are wrong."""
    device, results, whole = join(job), {}, cache(_whole_model)
    for words, fields in json.loads((job.folder / "cells.json").read_text()).items():
        cell = Cell.from_flat(fields)
        strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        with strategy.install() as wiring:
            workload, peak_bytes = _build(WorkloadRank(strategy, wiring, device, log.step))
            results[words] = {"peak_bytes": peak_bytes, **_compare(workload, cell, whole(cell.model))}
            del workload
    finish_together(device)
    return {"results": results}


def _build(rank):
    """Return the workload, and the peak of bytes before DeepSpeed makes the optimizer's state."""
    import deepspeed

    gc.collect()
    initialize, before = deepspeed.initialize, []

    def record_and_initialize(**keywords):
        before.append(tracker.peak_bytes)
        return initialize(**keywords)

    deepspeed.initialize = record_and_initialize
    with AllocationTracker() as tracker:
        start = tracker.peak_bytes
        workload = TrainWorkload(rank)
    deepspeed.initialize = initialize
    return workload, (*before, tracker.peak_bytes)[0] - start


def _whole_model(model):
    return build_model(model, attention_name="sdpa", max_positions=256, seed=0)


def _compare(workload, cell, plain):
    """Return the weights of the engine's model that differ from `plain`, and whether its head is tied."""
    from deepspeed.utils import safe_get_full_fp32_param

    full_tensor = {
        "ddp": lambda parameter: parameter,
        "fsdp2": lambda parameter: parameter.full_tensor(),
        "zero3": safe_get_full_fp32_param,
    }[cell.engine.name]
    dtype = torch.bfloat16 if cell.engine.name == "zero3" else torch.float32
    module = workload.trainer.engine.module
    while hasattr(module, "module"):
        module = module.module
    actual = {name: full_tensor(parameter) for name, parameter in module.model.named_parameters()}
    actual |= dict(module.model.named_buffers())
    rounded = {name: parameter.to(dtype).float() for name, parameter in plain.named_parameters()}
    expected = rounded | dict(plain.named_buffers())
    wrong = sorted(actual.keys() ^ expected.keys())
    wrong += [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    gathering = [getattr(parameter, "ds_process_group", None) for parameter in module.parameters()]
    return {
        "on_default_group": dist.group.WORLD in gathering,
        "wrong": wrong,
        "tied": module.model.lm_head.weight is module.model.model.embed_tokens.weight,
    }


def _bound_bytes(cell):
    """Return the bytes of this rank's shards (bf16 for ZeRO-3, else float32) and 1.5 layers in float32."""
    model = cell.model
    shards = cell.cluster.world_size if cell.engine.name == "zero3" else cell.dp_shard
    layer = layer_parameters(model) // model.num_layers
    whole = matrix_parameters(model) + (0 if model.tied_embeddings else head_parameters(model))
    return whole * (2 if cell.engine.name == "zero3" else 4) // shards + 4 * layer * 3 // 2


@pytest.mark.parametrize("ranks", SHARDED)
def test_engines_load_the_right_weights_layer_by_layer(launcher, tmp_path, ranks):
    cells = {words: deep_cell(ranks, words) for words in SHARDED[ranks]}
    (tmp_path / "cells.json").write_text(json.dumps({name: cell.flat() for name, cell in cells.items()}))
    ends = launcher.run(next(iter(cells.values())), tmp_path, entry=build_cells)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    for results in (end.report["results"] for end in ends):
        assert {words: result["wrong"] for words, result in results.items()} == {words: [] for words in cells}
        assert not any(result["on_default_group"] for result in results.values())
        assert {words: result["tied"] for words, result in results.items()} == {
            words: cell.model.tied_embeddings for words, cell in cells.items()
        }
        beyond = {
            words: (results[words]["peak_bytes"], _bound_bytes(cell))
            for words, cell in cells.items()
            if cell.engine.name != "ddp" and results[words]["peak_bytes"] > _bound_bytes(cell)
        }
        assert beyond == {}
