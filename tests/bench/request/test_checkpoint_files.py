"""Checkpoints with incomplete or other weights are refused by their headers."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from bench.config import ConfigError
from bench.request import checkpoint_files
from bench.request.checkpoint_files import left_out_line
from bench.training.weights import CheckpointWeights
from tests.support.cells import make_cell
from tests.support.checkpoints import shapes_of, write_weights

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER = "model.layers.0.self_attn."
NUMBERS = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
SHAPES = shapes_of(NUMBERS)
DEEPER = shapes_of(NUMBERS | {"num_hidden_layers": 3})


def renamed(old, new):
    return {name.replace(old, new): shape for name, shape in SHAPES.items()}


def without(*names):
    return {name: shape for name, shape in SHAPES.items() if name not in names}


TENSORS = {
    "compiled": ({f"_orig_mod.{name}": shape for name, shape in SHAPES.items()}, "names of a wrapper"),
    "data parallel": ({f"module.{name}": shape for name, shape in SHAPES.items()}, "names of a wrapper"),
    "empty head": (SHAPES | {HEAD: [0]}, "lm_head.weight has no numbers"),
    "empty embedding": (SHAPES | {EMBEDDING: [0]}, "embed_tokens.weight has no numbers"),
    "reward": (without(HEAD) | {"score.weight": [1, 32]}, "is a reward model"),
    "more rows": (SHAPES | {EMBEDDING: [65, 32]}, r"shape \[65, 32\], but its config.json requires"),
    "wider": (SHAPES | {EMBEDDING: [64, 33]}, r"shape \[64, 33\], but its config.json requires"),
    "fewer KV heads": (SHAPES | {f"{LAYER}k_proj.weight": [16, 32]}, r"k_proj.weight has shape \[16, 32\]"),
    "no head": (without(HEAD), "no lm_head.weight"),
    "no embedding": (without(EMBEDDING), "no model.embed_tokens.weight"),
    "no norm": (without(NORM), r"no model.norm.weight, which its config.json requires \(1 are missing\)"),
    "a bias": (
        SHAPES | {f"{LAYER}o_proj.bias": [32]},
        "o_proj.bias, which a qwen2 .* does not take; take the",
    ),
    "a bias of the head": (SHAPES | {"lm_head.bias": [64]}, "lm_head.bias, which a qwen2 .* does not take"),
    "query norms": (
        SHAPES | {f"{LAYER}q_norm.weight": [16]},
        "q_norm.weight, which a qwen2 .* does not take",
    ),
    "compiled layers": (renamed("layers.0.", "layers.0._orig_mod."), "names of a wrapper"),
    "FSDP": (renamed("model.", "_fsdp_wrapped_module.model."), "names of a wrapper"),
    "an adapter": (
        SHAPES | {f"{LAYER}q_proj.lora_A.default.weight": [4, 32]},
        "a part of an adapter; merge it",
    ),
    "an adapter's base": (renamed("q_proj.", "q_proj.base_layer."), "a part of an adapter; merge it"),
    "a model of peft": (renamed("model.", "base_model.model.model."), "a part of an adapter; merge it"),
}


def folder_with(folder, shapes, **changes):
    (folder / "config.json").write_text(json.dumps(NUMBERS | changes))
    if shapes is not None:
        write_weights(folder / "model.safetensors", shapes)
    return folder


def plan(folder):
    return make_cell("model=checkpoint", f"model.path={folder}", "seq_len=64", "strategy=local")


@pytest.mark.parametrize("case", TENSORS)
def test_other_tensors_are_refused(tmp_path, case):
    shapes, message = TENSORS[case]
    with pytest.raises(ConfigError, match=message):
        plan(folder_with(tmp_path, shapes))


LEFT_OUT = {
    "nothing": (SHAPES, None),
    "names of a decoder": ({re.sub("^model.", "", name): shape for name, shape in SHAPES.items()}, None),
    "buffers": (
        SHAPES | {f"{LAYER}rotary_emb.inv_freq": [8], "model.embed_tokens.position_ids": [1, 8]},
        "2 of 17 stored tensors",
    ),
    "scales of a cache": (
        SHAPES | {f"{LAYER}k_scale": [1], f"{LAYER}v_scale": [1]},
        "2 of 17 stored tensors",
    ),
    "cut layers": (DEEPER, "such as model.layers.1."),
    "an added head": (
        SHAPES | {"v_head.weight": [1, 32]},
        "such as v_head.weight",
    ),
    "a part for images": (SHAPES | {"visual.proj.weight": [2, 2]}, "1 of 16 stored tensors are left out"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_other_tensors_of_a_language_model_are_named(tmp_path, case):
    shapes, line = LEFT_OUT[case]
    named = left_out_line(plan(folder_with(tmp_path, shapes)).model)
    assert named is line is None or line in named


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_are_refused(tmp_path, dtype):
    weights = {name: torch.ones(shape).to(dtype) for name, shape in SHAPES.items()}
    save_file(weights, folder_with(tmp_path, None) / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds codes of type [FIU]8.*; name a folder"):
        plan(tmp_path)


def save_head(folder, head, *, tied=True):
    """Write a checkpoint of zeros with another head, or without one."""
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items() if name != HEAD}
    others = {} if head is None else {HEAD: head}
    folder_with(folder, None, tie_word_embeddings=tied)
    save_file(weights | others, folder / "model.safetensors")


@pytest.mark.parametrize("row", [0, 63])
def test_tied_head_with_other_numbers_is_refused(tmp_path, row, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "COMPARED_BYTES", 128)
    head = torch.zeros(64, 32)
    head[row] = 1
    save_head(tmp_path, head, tied=False)
    assert not plan(tmp_path).model.tied_embeddings
    save_head(tmp_path, head)
    with pytest.raises(ConfigError, match="differ, but its config"):
        plan(tmp_path)


@pytest.mark.parametrize("head", [None, torch.zeros(64, 32), torch.zeros(64, 32, dtype=torch.bfloat16)])
def test_tied_head_may_be_left_out_or_equal(tmp_path, head):
    save_head(tmp_path, head)
    assert plan(tmp_path).model.tied_embeddings


def test_tied_head_may_stand_for_the_embedding(tmp_path):
    assert plan(folder_with(tmp_path, without(EMBEDDING), tie_word_embeddings=True)).model.tied_embeddings


def test_config_alone_is_enough_for_a_prediction(tmp_path):
    words = ("model=checkpoint", f"model.path={folder_with(tmp_path, None)}", "hardware=h100_80gb")
    assert make_cell(*words, "mode=predict").model.num_layers == 1
    with pytest.raises(ConfigError, match=r"contains no \.safetensors file; .* or add mode=predict"):
        make_cell("model=checkpoint", f"model.path={tmp_path}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "not_yet.safetensors")}))
    model = make_cell(*words, "mode=predict").model
    assert left_out_line(model) is None
    with pytest.raises(ConfigError, match=r"no file not_yet\.safetensors"):
        plan(tmp_path)
    write_weights(tmp_path / "model.safetensors", without(NORM))
    with pytest.raises(ConfigError, match=r"has no model\.norm\.weight"):
        make_cell(*words, "mode=predict")


@pytest.mark.parametrize("size", [0, 5, 60, 3000])
def test_a_file_cut_short_is_refused(tmp_path, size):
    file = folder_with(tmp_path, SHAPES) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"within its header|but its header requires"):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("file", "version"), [("model.safetensors", "v1"), ("model.safetensors.index.json", "v2")]
)
def test_a_pointer_of_git_lfs_is_refused(tmp_path, file, version):
    folder_with(tmp_path, None)
    pointer = f"version https://git-lfs.github.com/spec/{version}\nsize 9\n"
    (tmp_path / file).write_text(pointer)
    with pytest.raises(ConfigError, match="run git lfs pull"):
        plan(tmp_path)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_shard_is_refused(tmp_path, missing):
    folder_with(tmp_path, None)
    files = {name: f"model-{1 + (name == HEAD)}.safetensors" for name in SHAPES}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        write_weights(tmp_path / file, {name: SHAPES[name] for name in SHAPES if files[name] == file})
    assert plan(tmp_path).model.vocab_size == 64
    (tmp_path / f"model-{missing}.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"no file model-{missing}.safetensors"):
        plan(tmp_path)


def test_single_file_comes_before_an_index(tmp_path):
    (folder_with(tmp_path, SHAPES) / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(SHAPES, "gone.safetensors")})
    )
    assert plan(tmp_path).model.vocab_size == 64
    assert set(CheckpointWeights(tmp_path).files.values()) == {"model.safetensors"}


def test_index_that_names_another_shard_is_read_by_the_shards(tmp_path):
    folder_with(tmp_path, None)
    parts = {"a.safetensors": without(NORM), "b.safetensors": {NORM: SHAPES[NORM]}}
    for file, shapes in parts.items():
        write_weights(tmp_path / file, shapes)
    wrong = {EMBEDDING: "b.safetensors", NORM: "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
    assert plan(tmp_path).model.vocab_size == 64
    files = CheckpointWeights(tmp_path).files
    assert (files[EMBEDDING], files[NORM]) == ("a.safetensors", "b.safetensors")


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_refused(tmp_path, has_config):
    folder_with(tmp_path, None)
    (tmp_path / "adapter_config.json").write_text("{}")
    write_weights(tmp_path / "adapter_model.safetensors", {"lora_A.weight": [8, 32]})
    if not has_config:
        (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="is an adapter; merge it"):
        plan(tmp_path)


@pytest.mark.parametrize("shard", ["global_step5", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_zero_shards_alone_are_refused(tmp_path, shard):
    (folder_with(tmp_path, None) / shard).mkdir()
    with pytest.raises(ConfigError, match="only shards of DeepSpeed ZeRO"):
        plan(tmp_path)
