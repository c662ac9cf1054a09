"""Published checkpoints: the model of a cell computes the same as transformers' class on one device."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from bench.extras.observe.observed_model import observed_model
from bench.training.models import build_model, empty_model
from tests.support.cells import make_cell, run_cell
from tests.support.faults import acts

TOKENS = 192
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64, "initializer_range": 0.3,
    "head_dim": 16,
}  # fmt: skip
ROWS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
SEES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
TOKEN_IDS = {
    "image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153,
}  # fmt: skip


def llava(family, **keys):
    text = AutoConfig.for_model(family, **TEXT, **keys).to_dict()
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=150)
    )


def qwen_vl(model_class, config_class, *, tied=False, **vision):
    text = {**TEXT, **ROWS}
    config = config_class(
        text_config=text, vision_config={**SEES, **vision}, tie_word_embeddings=tied, **TOKEN_IDS
    )
    return model_class(config)


def text_model(family, rope=None, **keys):
    more = {"rope_parameters": {"rope_theta": 1e4, **rope}} if rope else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TEXT, **more, **keys))


FOR_IMAGES = {
    "Qwen2.5-VL": lambda: qwen_vl(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig),
    "Qwen2.5-VL, tied": lambda: qwen_vl(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, tied=True),
    "Qwen3-VL": lambda: qwen_vl(
        Qwen3VLForConditionalGeneration, Qwen3VLConfig, deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    ),
    "LLaVA on Mistral": lambda: llava("mistral", sliding_window=None),
    "LLaVA on Qwen2": lambda: llava("qwen2"),
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * i for i in range(8)],
}  # fmt: skip
MODELS = FOR_IMAGES | {
    "Mistral": lambda: text_model("mistral", sliding_window=None),
    "a window as long as the sequence": lambda: text_model("mistral", sliding_window=TOKENS),
    "listed windows as long": lambda: text_model(
        "qwen3", sliding_window=TOKENS, use_sliding_window=True, max_window_layers=0
    ),
    "dynamic": lambda: text_model("qwen2", {"rope_type": "dynamic", "factor": 3.0}),
    "longrope": lambda: text_model("llama", LONG),
    "longrope with its length in another place": lambda: text_model(
        "qwen2",
        {**LONG, "original_max_position_embeddings": None},
        original_max_position_embeddings=32,
    ),
    "longrope of Mistral": lambda: text_model("mistral", {**LONG, "factor": 8.0}, sliding_window=None),
}


def save_and_build(model, folder):
    """Save a model; return it and the model that a cell builds from the checkpoint."""
    model.eval().save_pretrained(folder)
    return model, build_from(folder)


def build_from(folder):
    config = make_cell("model=checkpoint", f"model.path={folder}").model
    return build_model(config, attention_name="sdpa", max_positions=TOKENS, seed=0).eval()


def assert_same_logits(*models):
    ids = torch.randint(0, 140, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = (model(input_ids=ids).logits for model in models)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", MODELS)
def test_built_model_has_the_logits_of_the_checkpoints_class(tmp_path, case):
    """An observed model for images also has the configuration of its text model."""
    torch.manual_seed(0)
    model, built = save_and_build(MODELS[case](), tmp_path)
    assert_same_logits(model, built)
    if case in FOR_IMAGES:
        config = observed_model(model).sizes
        assert (config.family, config.num_layers, config.num_heads) == (built.config.model_type, 2, 4)


@pytest.mark.parametrize("case", ["a window as long as the sequence", "listed windows as long"])
def test_empty_model_drops_a_window_that_hides_nothing(tmp_path, case):
    """A strategy would refuse a layer with a window."""
    model = MODELS[case]()
    model.save_pretrained(tmp_path)
    config = make_cell("model=checkpoint", f"model.path={tmp_path}").model
    for tokens, window in ((TOKENS, None), (TOKENS + 1, TOKENS)):
        built = empty_model(config, attention_name="sdpa", max_positions=tokens).config
        assert built.sliding_window == window
        assert hasattr(built, "layer_types") == case.startswith(
            "listed"
        )  # else a save were read as Ministral
        is_listed = "sliding_attention" in getattr(built, "layer_types", [])
        assert is_listed == (case.startswith("listed") and window is not None)


def test_older_config_of_qwen2_5_vl_without_text_config(tmp_path):
    """Older files have the values of the text model at the top level."""
    torch.manual_seed(0)
    model, _ = save_and_build(FOR_IMAGES["Qwen2.5-VL"](), tmp_path)
    numbers = json.loads((tmp_path / "config.json").read_text())
    text = numbers.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    del text["rope_parameters"], text["model_type"]
    older = {**numbers, **text, "rope_theta": 1e6, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(older))
    built = build_from(tmp_path)
    assert built.config.model_type == "qwen2"
    assert_same_logits(built, model)


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_rope_frequencies_are_those_of_the_whole_sequence(launcher, tmp_path, case):
    """Frequencies that depend on a rank's largest position are a wrong result."""
    MODELS[case]().save_pretrained(tmp_path)
    words = ("model=checkpoint", f"model.path={tmp_path}", "strategy=ulysses", "cluster.world_size=2")
    cell = make_cell(*words, "seq_len=128", "measure.steps=1", "measure.warmup_steps=0")
    right, _ = run_cell(launcher, cell, tmp_path / "right")
    assert (right.status, right.positions.module) == ("ok", [None, None])
    wrong, _ = run_cell(launcher, cell, tmp_path / "wrong", acts.choose_frequencies_by_own_length)
    assert wrong.status == "wrong_result"
    assert wrong.reason.startswith("positions: ")
