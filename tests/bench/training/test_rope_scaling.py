"""A model with RoPE scaling computes what transformers' own model computes for the whole sequence."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.config import ConfigError
from bench.training.models import build_model
from tests.support.cells import make_cell, run_cell, tiny_cell

TRAINED, FACTOR, TOKENS = 64, 4.0, 256
EXTRA = {
    "linear": {},
    "dynamic": {},
    "yarn": {"original_max_position_embeddings": TRAINED},
    "llama3": {
        "original_max_position_embeddings": TRAINED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
"""Further RoPE parameters as transformers documents them, by type."""


def scaled_model(*words):
    cell = make_cell("model=qwen3_nano", f"seq_len={TOKENS}", f"model.trained_len={TRAINED}", *words)
    return cell.model


def theirs_like(model, rope):
    """Return transformers' model with the weights of `model` and these RoPE parameters."""
    config = model.config.to_dict() | {"rope_parameters": rope, "max_position_embeddings": TRAINED}
    config.pop("_attn_implementation", None)
    theirs = Qwen3ForCausalLM._from_config(Qwen3Config(**config), attn_implementation="sdpa")
    theirs.load_state_dict(model.state_dict())
    return theirs.eval()


@pytest.mark.parametrize("scaling", EXTRA)
@torch.no_grad()
def test_logits_equal_those_of_transformers(scaling):
    model = scaled_model(f"model.rope_scaling={scaling}", f"model.rope_factor={FACTOR}")
    ours = build_model(model, attention_name="sdpa", max_positions=TOKENS, seed=0).eval()
    rope = {"rope_type": scaling, "rope_theta": model.rope_theta, "factor": FACTOR, **EXTRA[scaling]}
    plain = {"rope_type": "default", "rope_theta": model.rope_theta}
    ids = torch.arange(TOKENS)[None] * 37 % 256
    logits, wanted, unscaled = (
        network(input_ids=ids).logits for network in (ours, theirs_like(ours, rope), theirs_like(ours, plain))
    )
    assert float((logits - wanted).abs().max()) < 1e-6
    assert float((logits - unscaled).abs().max()) > 1e-4


def test_factor_follows_the_length_beyond_the_training():
    words = ("model.rope_scaling=yarn", f"model.trained_len={TRAINED}")
    assert (scaled_model(*words).rope_scaling, scaled_model(*words).rope_factor) == ("yarn", None)
    network = build_model(scaled_model(*words), attention_name="sdpa", max_positions=TOKENS, seed=0)
    assert network.config.rope_parameters["factor"] == TOKENS / TRAINED
    for words in (
        ("model.rope_scaling=yarn", f"model.trained_len={TOKENS}"),
        ("model.rope_scaling=none", "model.rope_factor=8"),
    ):
        assert (scaled_model(*words).rope_scaling, scaled_model(*words).rope_factor) == ("none", None)


def checkpoint_of(folder, rope, **others):
    """Write a checkpoint of the nano model whose config.json has these RoPE parameters."""
    model = build_model(
        make_cell("model=qwen3_nano").model, attention_name="sdpa", max_positions=TRAINED, seed=0
    )
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope, **others}))
    return "model=checkpoint", f"model.path={folder}"


def test_checkpoint_keeps_its_scaling_by_default(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    words = checkpoint_of(tmp_path, rope)
    kept = make_cell(*words).model
    assert (kept.trained_len, kept.rope_scaling, kept.rope_factor) == (TRAINED, "linear", 2.0)
    assert make_cell(*words, "model.rope_factor=3").model == replace(kept, rope_factor=3.0)
    plain = make_cell(*words, "model.rope_scaling=none").model
    longer = make_cell(
        *words, "model.trained_len=128", "model.rope_scaling=linear", "model.rope_factor=2"
    ).model
    changed = build_model(longer, attention_name="sdpa", max_positions=TRAINED, seed=0).config
    assert changed.max_position_embeddings == 128
    settings = build_model(plain, attention_name="sdpa", max_positions=TRAINED, seed=0).config
    assert settings.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_another_factor_keeps_the_checkpoints_other_numbers(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    words = checkpoint_of(tmp_path, {**rope, "beta_fast": 16})
    model = make_cell(*words, "model.rope_factor=3", "model.trained_len=128").model
    network = build_model(model, attention_name="sdpa", max_positions=TRAINED, seed=0)
    expected = {"original_max_position_embeddings": 128, "factor": 3.0, "beta_fast": 16}
    assert network.config.rope_parameters.items() >= expected.items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.rope_factor=4",), "rope_scaling=none has no such factor; write for example"),
        (
            ("model.rope_scaling=yarn", "model.rope_factor=0.5"),
            "model.rope_factor=0.5: must be a number from",
        ),
        (("model.rope_scaling=yarn", "model.trained_len=null"), "write model.trained_len=TOKENS"),
        (("model.rope_scaling=yan",), "did you mean model.rope_scaling=yarn?"),
    ],
)
def test_factor_that_has_no_effect_is_refused(words, message):
    with pytest.raises(ConfigError) as error:
        make_cell("model=qwen3_nano", *words)
    assert message in str(error.value)


@pytest.mark.parametrize("scaling", ["dynamic", "llama3"])
def test_cell_passes_its_checks_with_scaling(launcher, tmp_path, scaling):
    cell = tiny_cell("strategy=ring", "dtype=fp32", f"model.rope_scaling={scaling}", "model.rope_factor=4")
    cell = replace(cell, model=replace(cell.model, trained_len=TRAINED))
    record, _ = run_cell(launcher, cell, tmp_path, without=("parity", "full_length"))
    assert record.status == "ok", record.reason
    assert record.positions.compared == 1
    assert record.positions.rope_type != "default"
    assert record.config["model.rope_scaling"] == scaling
