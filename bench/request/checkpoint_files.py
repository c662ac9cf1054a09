"""Faults of a checkpoint's safetensors files that their headers show, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bench.config import ModelConfig
from bench.training.text_model import text_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_START = b"version https://git-lfs"
LENGTH_BYTES = 8
WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "module.")
Shapes = Mapping[str, list[int]]
"""Shape of each tensor by its name in the files."""


def adapter_fault(folder: Path) -> str | None:
    """Return the message for a folder with an adapter and no weights of its model, else None."""
    has_weights = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    if has_weights or not (folder / "adapter_config.json").is_file():
        return None
    return "is an adapter; merge it into its model with peft's merge_and_unload and save_pretrained"


def weights_fault(folder: Path, model: ModelConfig) -> str | None:
    """Return the message for weights that are not complete or not those of `model`, else None."""
    if not any(folder.glob("*.safetensors")):
        if any(folder.glob("global_step*")) or any(folder.glob("zero_pp_rank_*")):
            return (
                "contains only shards of DeepSpeed ZeRO; convert them with its zero_to_fp32.py"
                " --safe_serialization"
            )
        return "contains no .safetensors file; write one with transformers' save_pretrained"
    try:
        shapes = _read_shapes(folder)
        return _layout_fault(shapes) or _model_fault(shapes, model)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"its weights cannot be read ({error}); download or save them again"


def _read_shapes(folder: Path) -> Shapes:
    """Return the shapes of all tensors; raise ValueError or OSError for a file that is not complete."""
    files = [WEIGHTS]
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(f"no file {missing[0]}")
    return {name: shape for file in files for name, shape in _read_header(folder / file).items()}


def _read_header(path: Path) -> Shapes:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_START))
        if start == LFS_START:
            raise ValueError(f"{path.name} is a pointer of Git LFS, so run git lfs pull")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if size < LENGTH_BYTES + length or size < LENGTH_BYTES:
            raise ValueError(f"{path.name} ends after {size} bytes, within its header")
        file.seek(LENGTH_BYTES)
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    data_bytes = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    expected = LENGTH_BYTES + length + data_bytes
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, but its header requires {expected}")
    return {name: tensor["shape"] for name, tensor in tensors.items()}


def _layout_fault(shapes: Shapes) -> str | None:
    """Return the message for tensors that were saved from a wrapper or without their numbers, else None."""
    wrapped = next((name for name in shapes if name.startswith(WRAPPER_PREFIXES)), None)
    if wrapped:
        return f"its weights have names of a wrapper, such as {wrapped}; save the model inside the wrapper"
    empty = next((name for name, shape in shapes.items() if 0 in shape), None)
    if empty:
        return f"{empty} has no numbers, as ZeRO-3 leaves it; gather the weights before saving them"
    return None


def _model_fault(shapes: Shapes, model: ModelConfig) -> str | None:
    """Return the message for tensors that are not those of a language model of these sizes, else None."""
    named = {text_name(name): shape for name, shape in shapes.items()}
    other = "name the folder of a causal language model"
    embedding, expected = named.get("model.embed_tokens.weight"), [model.vocab_size, model.hidden_size]
    if "lm_head.weight" not in named and "score.weight" in named:
        return f"is a reward model, with a score in place of lm_head; {other}"
    if embedding is None:
        return f"has no model.embed_tokens.weight in its safetensors files; {other}"
    if embedding != expected:
        return (
            f"model.embed_tokens.weight has shape {embedding}, but its config.json requires {expected};"
            " take the config.json that was saved with the weights"
        )
    if "lm_head.weight" not in named and not model.tied_embeddings:
        return f"has no lm_head.weight, and its config.json does not tie it; {other}"
    return None
