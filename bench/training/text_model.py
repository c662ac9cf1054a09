"""Text model in a transformers configuration, which may be that of a model for images and text. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ConfigDict = Mapping[str, Any]
"""Content of the config.json of a transformers model, which is also the result of `to_dict`."""

TEXT_FAMILIES: Mapping[str, str] = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
}
"""Families of text models by the family of the model for images.

The latter have three rows of rotary positions. The rows are equal for text, so that both compute the same.
"""
_LLAMA_SIZES = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
_QWEN_SIZES = _LLAMA_SIZES | {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32}
DEFAULTS: Mapping[str, ConfigDict] = {
    "llama": _LLAMA_SIZES,
    "mistral": _LLAMA_SIZES | {"intermediate_size": 14_336, "num_key_value_heads": 8},
    "qwen2": _QWEN_SIZES,
    "qwen3": _QWEN_SIZES | {"head_dim": 128},
}
"""Defaults of transformers by family, for values that the `text_config` of a model for images leaves out.

The `text_config` of LLaVA, for example, has only the values that differ from the defaults.
"""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""RoPE types of transformers whose frequencies depend on the largest position in the forward pass."""
_TEXT_MODEL_PREFIX = re.compile(r"\b(language|text)_model\.")


def text_config(numbers: ConfigDict) -> dict[str, Any]:
    """Return the configuration of the text model; `model_type` is a family of `bench.training.models`."""
    inner = numbers.get("text_config") or {}
    text = {**DEFAULTS.get(_family(inner), {}), **numbers, **inner} if inner else dict(numbers)
    text.pop("text_config", None)
    if numbers.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True  # transformers ties them if the outer configuration says so
    if text.get("model_type") not in TEXT_FAMILIES:
        return text
    rope = {key: text[key] for key in ("rope_scaling", "rope_parameters") if text.get(key)}
    return {**text, "model_type": _family(text), **{key: _text_rope(value) for key, value in rope.items()}}


def _family(numbers: ConfigDict) -> str:
    """Return the family of the text model."""
    model_type = str(numbers.get("model_type"))
    return TEXT_FAMILIES.get(model_type, model_type)


def _text_rope(rope: ConfigDict) -> dict[str, Any]:
    """Return RoPE parameters for one row of positions instead of three."""
    text = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in text.items()}


def text_name(name: str) -> str:
    """Return the name of a checkpoint's parameter in the text model alone."""
    return _TEXT_MODEL_PREFIX.sub("", name, count=1)
