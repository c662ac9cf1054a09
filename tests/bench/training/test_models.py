"""Models have their published sizes, and weights come from the seed or from a checkpoint."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from bench.ranks.log import WrongResultError
from bench.training.models import build_model, empty_model
from tests.support.cells import make_cell

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
def test_model_has_its_published_number_of_parameters(name):
    config = make_cell(f"model={name}").model
    model = empty_model(config, attention_name="sdpa", max_positions=8192)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def nano(seed=3, **changed):
    config = replace(make_cell("model=qwen3_nano").model, **changed)
    return build_model(config, attention_name="sdpa", max_positions=256, seed=seed)


def test_random_weights_have_the_distribution_of_transformers():
    model = nano(vocab_size=4096, tied_embeddings=False, family="qwen2", attention_bias=True)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            assert float(module.weight.std()) == pytest.approx(0.02, rel=0.05)
    layer = model.model.layers[0]
    assert not layer.self_attn.q_proj.bias.any()
    assert torch.equal(layer.input_layernorm.weight, torch.ones(64))
    weights = [p.flatten()[:64].tolist() for p in model.parameters() if p.dim() > 1]
    assert len({tuple(weight) for weight in weights}) == len(weights)


def test_random_weight_depends_only_on_the_seed_and_its_name():
    small, large, other = nano(), nano(num_layers=2, tied_embeddings=False), nano(seed=4)
    for name, weight in small.named_parameters():
        assert torch.equal(weight, large.get_parameter(name))
        assert torch.equal(weight, other.get_parameter(name)) == (weight.dim() == 1)


@pytest.mark.parametrize("left_out", ["Qwen3RMSNorm", "Qwen3RotaryEmbedding"])
def test_a_weight_that_transformers_does_not_set_is_refused(monkeypatch, left_out):
    initialize = PreTrainedModel._init_weights

    def partly(model, module):
        if type(module).__name__ != left_out:
            initialize(model, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", partly)
    with pytest.raises(ValueError, match=rf"{left_out}\.\w+: not all of its numbers were set"):
        nano()


def checkpoint_of(folder, model, **saving):
    """Save a model and return the configuration of the checkpoint."""
    model.save_pretrained(folder, **saving)
    return make_cell("model=checkpoint", f"model.path={folder}").model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["5GB", "50KB"], ids=["one file", "several files"])
def test_checkpoint_builds_the_same_model(tmp_path, size, tied):
    model = nano(tied_embeddings=tied)
    model.config.use_cache = True  # as in published checkpoints
    loaded = checkpoint_of(tmp_path, model, max_shard_size=size)
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, loaded.path) == (1, 2, 16, str(tmp_path))
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (size == "50KB")
    again = build_model(loaded, attention_name="sdpa", max_positions=256, seed=0)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert not again.config.use_cache
    pairs = zip(again.named_parameters(), model.named_parameters(), strict=True)
    for (name, weight), (expected_name, expected_weight) in pairs:
        assert name == expected_name
        assert torch.equal(weight, expected_weight)
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def damaged_checkpoint(folder, change):
    """Return a checkpoint after `change` was applied to its tensors."""
    loaded = checkpoint_of(folder, nano())
    tensors = load_file(folder / SAFE_WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / SAFE_WEIGHTS_NAME)
    return loaded


def with_first(name, *numbers):
    """Return a change that sets the first elements of a parameter."""

    def change(tensors):
        tensors[name].view(-1)[: len(numbers)] = torch.tensor(numbers)

    return change


NORM, LAYER = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DAMAGES = {
    "missing": (ValueError, lambda tensors: tensors.pop(NORM), f"no {NORM} in its safetensors files"),
    "of another shape": (
        ValueError,
        lambda tensors: tensors.update({NORM: torch.ones(1)}),
        f"{NORM} has shape [1], but its config.json requires [64]",
    ),
    "tied, but different": (
        ValueError,
        lambda tensors: tensors.update({HEAD: torch.zeros(256, 64)}),
        f"{EMBEDDING} and {HEAD} differ, but its config.json ties them",
    ),
    "NaN": (WrongResultError, with_first(NORM, torch.nan), f"{NORM} holds NaN or infinity in 1 of its 64"),
    "two infinities that cancel": (
        WrongResultError,
        with_first(LAYER, torch.inf, -torch.inf),
        f"{LAYER} holds NaN or infinity in 2 of its {128 * 64} numbers; weights have to be finite",
    ),
    "tied NaN": (
        WrongResultError,
        lambda tensors: tensors.update(
            {name: torch.full((256, 64), torch.nan) for name in (EMBEDDING, HEAD)}
        ),
        f"{EMBEDDING} holds NaN or infinity in {256 * 64} of its {256 * 64}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_with_a_damaged_tensor_is_refused(tmp_path, damage):
    error, change, message = DAMAGES[damage]
    loaded = damaged_checkpoint(tmp_path, change)
    with pytest.raises(error, match=re.escape(message)):
        build_model(loaded, attention_name="sdpa", max_positions=256, seed=0)
