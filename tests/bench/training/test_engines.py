"""ZeRO-3's hooks are where `engine.leaf` puts them."""

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, get_z3_leaf_modules

from bench.training.engines import zero3_config
from bench.training.models import FAMILIES, empty_model
from tests.cells import make_cell


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("leaf", ["none", "layer"])
def test_whole_layers_have_hooks_where_asked(family, leaf):
    cell = make_cell("model=qwen3_nano", f"model.family={family}", "engine=zero3", f"engine.leaf={leaf}")
    model = empty_model(cell.model, attention_name="sdpa", max_positions=64)
    settings = DeepSpeedZeroConfig(**zero3_config(cell)["zero_optimization"])
    apply_zero_leaf_module_config(model, settings.leaf_module)
    assert get_z3_leaf_modules(model) == ([] if leaf == "none" else [*model.model.layers])
