"""The text model in a transformers configuration, which may be that of a model for images, too. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]
"""A transformers configuration: what config.json holds, or `to_dict` returns."""

SAME_FOR_TEXT: Mapping[str, str] = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
}
"""Families that turn by three rows of positions. Of text the rows are one: they compute what these do."""
_LLAMA_SIZES = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
_QWEN_SIZES = _LLAMA_SIZES | {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32}
DEFAULTS: Mapping[str, Numbers] = {
    "llama": _LLAMA_SIZES,
    "mistral": _LLAMA_SIZES | {"intermediate_size": 14_336, "num_key_value_heads": 8},
    "qwen2": _QWEN_SIZES,
    "qwen3": _QWEN_SIZES | {"head_dim": 128},
}
"""What transformers takes, by family, where the `text_config` of a model for images names no number. LLaVA's
names only what differs."""
BY_LENGTH = ("dynamic", "longrope")
"""Rope types of transformers whose frequencies follow from the largest position that a rank is given."""
_INSIDE = re.compile(r"\b(language|text)_model\.")


def text_numbers(numbers: Numbers) -> dict[str, Any]:
    """The text model's numbers, under the family whose layers it has."""
    inner = numbers.get("text_config") or {}
    text = {**DEFAULTS.get(_family(inner), {}), **numbers, **inner} if inner else dict(numbers)
    text.pop("text_config", None)
    if numbers.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True  # the outer model ties them where either says so
    if text.get("model_type") not in SAME_FOR_TEXT:
        return text
    rope = {key: text[key] for key in ("rope_scaling", "rope_parameters") if text.get(key)}
    return {**text, "model_type": _family(text), **{key: _one_row(value) for key, value in rope.items()}}


def _family(numbers: Numbers) -> str:
    """The family whose layers a text model has."""
    named = str(numbers.get("model_type"))
    return SAME_FOR_TEXT.get(named, named)


def _one_row(rope: Numbers) -> dict[str, Any]:
    """Rotary parameters without what tells three rows apart."""
    one = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in one.items()}


def text_name(name: str) -> str:
    """A stored parameter's name as the text model by itself has it."""
    return _INSIDE.sub("", name, count=1)
