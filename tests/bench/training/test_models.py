"""The shapes in conf/model/ are those of the published models."""

import pytest
import torch

from bench.training.models import build_model, empty_model
from tests.cells import make_cell

PARAMETERS = {
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "llama3_1_8b": 8_030_261_248,
    "llama2_7b": 6_738_415_616,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_model_has_its_published_number_of_parameters(name):
    config = make_cell(f"model={name}").model
    model = empty_model(config, attention_name="sdpa", max_positions=8192)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_a_local_checkpoint_folder_gives_the_same_model(tmp_path):
    config = make_cell("model=qwen3_nano").model
    model = build_model(config, attention_name="sdpa", max_positions=256, seed=3)
    model.save_pretrained(tmp_path)
    loaded = make_cell("model=checkpoint", f"model.path={tmp_path}").model
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, loaded.path) == (1, 2, 16, str(tmp_path))
    again = build_model(loaded, attention_name="sdpa", max_positions=256, seed=0)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight)
