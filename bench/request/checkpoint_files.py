"""Faults of a checkpoint's safetensors files that their headers show, read without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.config import ModelConfig
from bench.training.text_model import text_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError)
LFS_START = b"version https://git-lfs"
LENGTH_BYTES = 8
WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_(fsdp|checkpoint)_wrapped_module|_forward_module|pretrained_model|module)\."
)
ADAPTER = re.compile(r"lora_|\.base_layer\.|\.modules_to_save\.|^base_model\.model\.")
NUMBER_DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of tensors in safetensors files that hold the weights themselves, not codes to multiply by scales."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LANGUAGE_MODEL = re.compile(r"(model\.(layers|norm|embed_tokens)|lm_head)\.(.*\.)?(weight|bias)$")
"""Name of a weight in a language model. Other names in it are buffers, or scales of caches."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
OTHER_FOLDER = "name the folder of a causal language model"
OWN_CONFIG = "take the config.json that was saved with the weights"
COMPARED_BYTES = 2**20
"""Bytes at each end of a head that are compared with its tied embedding; ranks compare the rest."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a safetensors file, by the header."""

    file: Path
    dtype: str
    shape: list[int]
    start: int
    end: int

    def ends(self) -> tuple[bytes, bytes]:
        """Return the first and the last COMPARED_BYTES."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            first = file.read(min(COMPARED_BYTES, self.end - self.start))
            file.seek(max(self.start, self.end - COMPARED_BYTES))
            return first, file.read(len(first))


Tensors = Mapping[str, StoredTensor]
"""Tensors by their names."""


def adapter_fault(folder: Path) -> str | None:
    """Return the message for a folder with an adapter and no weights of its model, else None."""
    has_weights = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    if has_weights or not (folder / "adapter_config.json").is_file():
        return None
    return "is an adapter; merge it into its model with peft's merge_and_unload and save_pretrained"


def weights_fault(folder: Path, model: ModelConfig, needs_weights: bool) -> str | None:
    """Return the message for weights that are not complete, if needed, or not those of `model`, else None."""
    try:
        tensors = _read_tensors(folder)
    except READ_ERRORS as error:
        return _reading_fault(folder, error) if needs_weights else None
    return _layout_fault(tensors) or _model_fault(tensors, model)


def _reading_fault(folder: Path, error: Exception) -> str:
    if any(folder.glob("*.safetensors*")):
        return f"its weights cannot be read ({error}); download or save them again"
    if any(folder.glob("global_step*")) or any(folder.glob("zero_pp_rank_*")):
        return "contains only shards of DeepSpeed ZeRO; convert them: zero_to_fp32.py --safe_serialization"
    return "contains no .safetensors file; write one with transformers' save_pretrained, or add mode=predict"


def left_out_line(model: ModelConfig) -> str | None:
    """Return the line of the plan on weights of which `model` takes only a part, else None."""
    try:
        names = [*map(text_name, _read_tensors(Path(str(model.path))))]
    except READ_ERRORS:  # a prediction needs no weights
        return None
    others = [name for name in names if _is_left_out(name, model)]
    if not others:
        return None
    return (
        f"model.path={model.path}: {len(others)} of {len(names)} stored tensors are left out, which its"
        f" config.json does not have, such as {others[0]}"
    )


def _read_tensors(folder: Path) -> Tensors:
    """Return all stored tensors; raise ValueError or OSError for a file that is not complete."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        content = (folder / INDEX).read_bytes()
        _raise_for_pointer(folder / INDEX, content)
        files = sorted(set(json.loads(content)["weight_map"].values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(f"no file {missing[0]}")
    return {name: tensor for file in files for name, tensor in _read_header(folder / file).items()}


def _raise_for_pointer(path: Path, content: bytes) -> None:
    if content.startswith(LFS_START):
        raise ValueError(f"{path.name} is a pointer of Git LFS, so run git lfs pull")


def _read_header(path: Path) -> Tensors:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_START))
        _raise_for_pointer(path, start)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if size < LENGTH_BYTES + length or size < LENGTH_BYTES:
            raise ValueError(f"{path.name} ends after {size} bytes, within its header")
        file.seek(LENGTH_BYTES)
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = {
        name: StoredTensor(
            path,
            entry["dtype"],
            entry["shape"],
            *(LENGTH_BYTES + length + place for place in entry["data_offsets"]),
        )
        for name, entry in header.items()
    }
    expected = max((tensor.end for tensor in tensors.values()), default=LENGTH_BYTES + length)
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, but its header requires {expected}")
    return tensors


def _layout_fault(tensors: Tensors) -> str | None:
    """Return the message for tensors of an adapter or a wrapper, or without their numbers, else None."""
    adapted = next(filter(ADAPTER.search, tensors), None)
    if adapted:
        return (
            f"has {adapted}, a part of an adapter; merge it with peft's merge_and_unload and save_pretrained"
        )
    wrapped = next(filter(WRAPPERS.search, tensors), None)
    if wrapped:
        return f"its weights have names of a wrapper, such as {wrapped}; save the model inside the wrapper"
    empty = next((name for name, tensor in tensors.items() if 0 in tensor.shape), None)
    if empty:
        return f"{empty} has no numbers, as ZeRO-3 leaves it; gather the weights before saving them"
    return None


def _model_fault(tensors: Tensors, model: ModelConfig) -> str | None:
    """Return the message for tensors that are not those of a language model of these sizes, else None."""
    from bench.training.models import parameter_shapes  # imports torch, as reading config.json did

    named = {text_name(name): tensor for name, tensor in tensors.items()}
    if EMBEDDING not in named and not (model.tied_embeddings and HEAD in named):
        return f"has no {EMBEDDING} in its safetensors files; {OTHER_FOLDER}"
    if HEAD not in named and "score.weight" in named:
        return f"is a reward model, with a score in place of lm_head; {OTHER_FOLDER}"
    if HEAD not in named and not model.tied_embeddings:
        return f"has no {HEAD}, and its config.json does not tie it; {OTHER_FOLDER}"
    try:
        shapes = parameter_shapes(model)
    except Exception as error:  # noqa: BLE001  transformers raises many kinds for settings that do not fit
        return f"transformers cannot build the model of its config.json ({error}); correct it there"
    return _tensor_fault(named, shapes, model) or _tie_fault(named, model)


def _tensor_fault(named: Tensors, shapes: Mapping[str, list[int]], model: ModelConfig) -> str | None:
    """Return the message for the first stored tensor that the model cannot take, or lacks, else None."""
    for name, tensor in named.items():
        if _is_left_out(name, model):
            continue
        if tensor.dtype not in NUMBER_DTYPES:
            return (
                f"{name} holds codes of type {tensor.dtype}; name a folder with weights in bf16, fp16 or fp32"
            )
        if name not in shapes:
            return f"has {name}, which a {model.family} with its config.json does not take; {OWN_CONFIG}"
        if tensor.shape != shapes[name]:
            return (
                f"{name} has shape {tensor.shape}, but its config.json requires {shapes[name]}; {OWN_CONFIG}"
            )
    missing = [name for name in shapes if name not in named and name not in (EMBEDDING, HEAD)]
    if missing:
        return (
            f"has no {missing[0]}, which its config.json requires ({len(missing)} are missing); {OWN_CONFIG}"
        )
    return None


def _tie_fault(named: Tensors, model: ModelConfig) -> str | None:
    """Return the message for a head that is stored although it is tied, with other numbers, else None."""
    head, embedding = named.get(HEAD), named.get(EMBEDDING)
    if head is None or embedding is None or not model.tied_embeddings or head.dtype != embedding.dtype:
        return None
    if head.ends() == embedding.ends():
        return None
    return (
        f"{HEAD} and {EMBEDDING} differ, but its config.json ties them; write tie_word_embeddings=false there"
    )


def _is_left_out(name: str, model: ModelConfig) -> bool:
    """Return whether a tensor is no weight of the language model, or in a layer that config.json cuts off."""
    layer = LAYER.match(name)
    return not LANGUAGE_MODEL.match(name) or (layer is not None and int(layer[1]) >= model.num_layers)
