"""ZeRO-3 has its hooks on the modules of `engine.leaf`, and offloading counts the bytes that it moves."""

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, get_z3_leaf_modules

from bench.training.engines.zero3.engine import zero3_config
from bench.training.models import FAMILIES, empty_model
from bench.training.parameters import parameters
from tests.support.cells import CHECKS, make_cell, run_cell, tiny_cell
from tests.support.many_cells import results_of_cells, watch_offloading


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("leaf", ["none", "layer"])
def test_engine_leaf_sets_the_modules_that_have_hooks(family, leaf):
    cell = make_cell("model=qwen3_nano", f"model.family={family}", "engine=zero3", f"engine.leaf={leaf}")
    model = empty_model(cell.model, attention_name="sdpa", max_positions=64)
    settings = DeepSpeedZeroConfig(**zero3_config(cell)["zero_optimization"])
    apply_zero_leaf_module_config(model, settings.leaf_module)
    assert get_z3_leaf_modules(model) == ([] if leaf == "none" else [*model.model.layers])


def test_zero3_trains_on_eight_ranks_with_requested_replicas(launcher, tmp_path):
    degrees = ("sp_degree=4", "dp_replicate=2", "cluster.world_size=8")
    cell = tiny_cell("strategy=deepspeed_ulysses", "engine=zero3", *degrees)
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert record.status == "ok", record.reason
    assert record.config["dp_shard"] == 2


def test_offloading_counts_the_bytes_that_it_moves(launcher, tmp_path):
    common = ("strategy=local", "seq_len=1k", "engine=zero3", "model.vocab_size=64", "model.num_layers=2")
    switches = ("checkpointing=true", "offload.activations=true", "offload.optimizer=true")
    cells = {"plain": make_cell(*common), "offload": make_cell(*common, *switches)}
    offloaded = {
        name: by_rank[0]
        for name, by_rank in results_of_cells(launcher, tmp_path, cells, watch_offloading).items()
    }
    model = cells["offload"].model
    assert offloaded == {
        "plain": {"activations": None, "optimizer": None},
        "offload": {
            "activations": 2 * model.num_layers * model.hidden_size * 1024,
            "optimizer": (4 + 2) * parameters(model),
        },
    }
