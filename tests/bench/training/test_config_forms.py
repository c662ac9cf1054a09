"""A cell builds the model of transformers' from_pretrained, whatever the form of the config.json."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.config import ConfigError
from bench.training.models import empty_model
from tests.support.cells import make_cell

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 4096, "head_dim": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
OLD = {"rope_parameters": None, "rope_theta": 1e6}
"""Edits of a file in the form of transformers 5 to that of transformers 4."""
FORMS = {
    "as saved": {},
    "scaling added as model cards advise": {"rope_scaling": YARN},
    "scaling added with a base": {"rope_scaling": {**YARN, "rope_theta": 5e5}},
    "scaling added to plain parameters": {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN},
    "another scaling added": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": YARN},
    "scaling null": {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": "null"},
    "scaling empty": {"rope_scaling": {}},
    "two bases": {"rope_theta": 1e6},
    "base beside the parameters": {"rope_parameters": YARN, "rope_theta": 1e6},
    "no RoPE": {"rope_parameters": None},
    "old, plain": OLD,
    "old, an integer base": {"rope_parameters": None, "rope_theta": 500000},
    "old, YaRN": {**OLD, "rope_scaling": YARN},
    "old, YaRN by type": {**OLD, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "old, both types": {**OLD, "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
    "old, linear": {**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "old, Llama 3": {**OLD, "rope_scaling": LLAMA3},
    "default type": {**OLD, "rope_scaling": {"rope_type": "default"}},
    "YaRN's other numbers": {"rope_parameters": {**YARN, "beta_fast": 16, "attention_factor": 1.5}},
    "YaRN of DeepSeek": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "YaRN from a length in another place": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 512,
    },
    "YaRN not truncated": {"rope_parameters": {**YARN, "truncate": False}},
    "other positions": {"rope_scaling": YARN, "max_position_embeddings": 8192},
    "keys of other families": {"sliding_window": 16, "use_sliding_window": False, "alibi": True},
    "defaults": {"rms_norm_eps": None, "attention_bias": None, "attention_dropout": None},
}
"""Edits of a config.json; None removes a key."""
REFUSED = {
    "base as text": {**OLD, "rope_theta": "1000000"},
    "base as text in parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}},
    "factor as text": {"rope_scaling": {**YARN, "factor": "4.0"}},
    "no factor": {"rope_scaling": {"rope_type": "yarn"}},
    "unknown type": {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
    "a size as text": {"hidden_size": "64"},
    "a fraction": {"num_hidden_layers": 2.0},
    "too few layer types": {"layer_types": ["full_attention"], "num_hidden_layers": 3},
    "unknown activation": {"hidden_act": "swish2"},
    "heads that do not divide": {"num_attention_heads": 3, "head_dim": None},
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SMALL)).save_pretrained(folder)
    return folder


def edited(saved, folder, edit):
    """Return a copy of a checkpoint with another config.json."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | edit
    kept = {key: None if value == "null" else value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def facts(model):
    """Return the shapes of parameters, the rotary frequencies and the factor on them."""
    rotary = type(model.model.rotary_emb)(model.config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    return shapes, rotary.inv_freq.tolist(), rotary.attention_scaling, model.config.rms_norm_eps


def planned(folder):
    model = make_cell("model=checkpoint", f"model.path={folder}", "seq_len=4k").model
    assert model.trained_len in (512, 1024, 4096, 8192)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_model_is_the_one_of_from_pretrained(saved, tmp_path, form):
    folder = edited(saved, tmp_path, FORMS[form])
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert facts(empty_model(planned(folder), attention_name="sdpa", max_positions=4096)) == facts(theirs)


@pytest.mark.parametrize("form", REFUSED)
def test_file_that_transformers_cannot_load_is_refused(saved, tmp_path, form):
    folder = edited(saved, tmp_path, REFUSED[form])
    with pytest.raises(Exception):  # noqa: B017, PT011  any error
        AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[1, 2]]))
    with pytest.raises(
        ConfigError, match=r"model\.path=.*; (correct it there|name a folder|write)"
    ) as refused:
        planned(folder)
    assert "\n" not in str(refused.value)
