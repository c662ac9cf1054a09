"""Checkpoints with incomplete or other weights are refused by their headers."""

import json

import pytest

from bench.config import ConfigError
from tests.support.cells import make_cell
from tests.support.checkpoints import write_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDING: [64, 32], HEAD: [64, 32]}
NUMBERS = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TENSORS = {
    "compiled": ({f"_orig_mod.{name}": shape for name, shape in SHAPES.items()}, "names of a wrapper"),
    "data parallel": ({f"module.{name}": shape for name, shape in SHAPES.items()}, "names of a wrapper"),
    "empty head": (SHAPES | {HEAD: [0]}, "lm_head.weight has no numbers"),
    "empty embedding": (SHAPES | {EMBEDDING: [0]}, "embed_tokens.weight has no numbers"),
    "reward": ({EMBEDDING: [64, 32], "score.weight": [1, 32]}, "is a reward model"),
    "reward of two": ({EMBEDDING: [64, 32], "score.weight": [2, 32]}, "is a reward model"),
    "more rows": (SHAPES | {EMBEDDING: [65, 32]}, r"shape \[65, 32\], but its config.json requires"),
    "wider": (SHAPES | {EMBEDDING: [64, 33]}, r"shape \[64, 33\], but its config.json requires"),
    "no head": ({EMBEDDING: [64, 32]}, "no lm_head.weight"),
    "no embedding": ({HEAD: [64, 32]}, "no model.embed_tokens.weight"),
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


def test_sound_and_tied_weights_are_accepted(tmp_path):
    assert plan(folder_with(tmp_path, SHAPES)).model.vocab_size == 64
    assert plan(folder_with(tmp_path, {EMBEDDING: [64, 32]}, tie_word_embeddings=True)).model.tied_embeddings


@pytest.mark.parametrize("size", [0, 5, 60, 3000])
def test_a_file_cut_short_is_refused(tmp_path, size):
    file = folder_with(tmp_path, SHAPES) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"within its header|but its header requires"):
        plan(tmp_path)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_pointer_of_git_lfs_is_refused(tmp_path, version):
    folder_with(tmp_path, None)
    pointer = f"version https://git-lfs.github.com/spec/{version}\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match="run git lfs pull"):
        plan(tmp_path)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_shard_is_refused(tmp_path, missing):
    folder_with(tmp_path, None)
    files = {EMBEDDING: "model-1.safetensors", HEAD: "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name, file in files.items():
        write_weights(tmp_path / file, {name: SHAPES[name]})
    assert plan(tmp_path).model.vocab_size == 64
    (tmp_path / f"model-{missing}.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"no file model-{missing}.safetensors"):
        plan(tmp_path)


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
