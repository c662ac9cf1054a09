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
BY_LENGTH = ("dynamic", "longrope")
"""Rope types of transformers whose frequencies follow from the largest position that a rank is given."""
_INSIDE = re.compile(r"\b(language|text)_model\.")


def text_numbers(numbers: Numbers) -> dict[str, Any]:
    """The text model's numbers, under the family whose layers it has."""
    text = {**numbers, **(numbers.get("text_config") or {})}
    text.pop("text_config", None)
    if numbers.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True  # the outer model ties them where either says so
    family = SAME_FOR_TEXT.get(str(text.get("model_type")))
    if family is None:
        return text
    rope = {key: text[key] for key in ("rope_scaling", "rope_parameters") if text.get(key)}
    return {**text, "model_type": family, **{key: _one_row(value) for key, value in rope.items()}}


def _one_row(rope: Numbers) -> dict[str, Any]:
    """Rotary parameters without what tells three rows apart."""
    one = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in one.items()}


def text_name(name: str) -> str:
    """A stored parameter's name as the text model by itself has it."""
    return _INSIDE.sub("", name, count=1)
