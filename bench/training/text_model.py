"""Configuration of a text model, also of one inside a model for images and text. Must not import torch."""

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
"""Family of the text model inside a model for images, by the `model_type` of the latter.

Models for images give every token three rotary positions. For text the three are equal, so that the text
model computes the same as a model of the plain family, which has one.
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
"""Default values of transformers by family, for keys that the `text_config` of a model for images leaves out.

The `text_config` of LLaVA, for example, has only the values that differ from the defaults.
"""
LISTED_FACTORS = "longrope"
"""RoPE type of transformers with a factor for each frequency."""
LENGTH_DEPENDENT_ROPE = ("dynamic", LISTED_FACTORS)
"""RoPE types of transformers whose frequencies depend on the largest position in the forward pass."""
_TEXT_MODEL_PREFIX = re.compile(r"\b(language|text)_model\.")


def text_config(config: ConfigDict) -> dict[str, Any]:
    """Return the configuration of the text model in a model's configuration.

    Its `model_type` is that of the plain text model, such as qwen2, and its RoPE has one position per token.
    """
    inner = config.get("text_config") or {}
    text = {**DEFAULTS.get(_family(inner), {}), **config, **inner} if inner else dict(config)
    text.pop("text_config", None)
    if config.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True  # transformers ties them if the outer configuration says so
    if text.get("model_type") not in TEXT_FAMILIES:
        return text
    rope = {key: text[key] for key in ("rope_scaling", "rope_parameters") if text.get(key)}
    return {**text, "model_type": _family(text), **{key: _text_rope(value) for key, value in rope.items()}}


def _family(config: ConfigDict) -> str:
    """Return the family of the text model."""
    model_type = str(config.get("model_type"))
    return TEXT_FAMILIES.get(model_type, model_type)


def _text_rope(rope: ConfigDict) -> dict[str, Any]:
    """Return RoPE parameters without the settings that belong to three positions per token."""
    text = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in text.items()}


def rope_parameters(config: ConfigDict) -> ConfigDict:
    """Return the RoPE parameters of a text model's configuration; empty for plain RoPE in an older format."""
    parameters: ConfigDict = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return parameters


def rope_type(config: ConfigDict) -> str:
    """Return the type of RoPE scaling in a text model's configuration, `none` for plain RoPE."""
    parameters = rope_parameters(config)
    name = str(parameters.get("rope_type", parameters.get("type", "default")))
    return "none" if name == "default" else name


def text_name(name: str) -> str:
    """Return the name in the text model of a checkpoint's parameter, whose own name may have a prefix."""
    return _TEXT_MODEL_PREFIX.sub("", name, count=1)
