"""Configuration of a text model, also of one inside a model for images and text, as transformers reads it.

The module must not import torch. Only `read_config` does, in the call: transformers' AutoConfig needs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ConfigDict = Mapping[str, Any]
"""Settings of a text model with transformers' names, and with its defaults: see `text_config`."""

TEXT_FAMILIES: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Family of the text model inside a model for images, by the `model_type` of the latter.

Models for images give every token three rotary positions. For text the three are equal, so that the text
model computes the same as a model of the plain family, which has one.
"""
WHOLE_MODEL_KEYS = ("tie_word_embeddings", "quantization_config", "compression_config")
"""Keys that a model for images has for its text model too."""
THREE_POSITION_KEYS = ("mrope_section", "mrope_interleaved")
"""RoPE parameters that only a model with three positions per token has."""
DECODER_PARTS = ("embed_tokens.", "layers.", "norm.")
LISTED_FACTORS = "longrope"
"""RoPE type of transformers with a factor for each frequency."""
LENGTH_DEPENDENT_ROPE = ("dynamic", LISTED_FACTORS)
"""RoPE types of transformers whose frequencies depend on the largest position in the forward pass."""
_TEXT_MODEL_PREFIX = re.compile(r"\b(language|text)_model\.")


def read_config(folder: Path) -> ConfigDict:
    """Return the configuration of the text model in a folder, as transformers reads its config.json.

    It is the `model_type` alone for a family that transformers does not have.
    """
    return deepcopy(_read_once(folder, (folder / "config.json").read_text()))


@cache
def _read_once(folder: Path, content: str) -> ConfigDict:
    """Return the configuration; read again, transformers would repeat its warnings."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = json.loads(content).get("model_type")
    if family is not None and family not in CONFIG_MAPPING:
        return {"model_type": family}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    text = config.get_text_config(decoder=True)
    if getattr(text, "rope_parameters", None):
        text.standardize_rope_params()  # as transformers does when it computes frequencies
    return text_config(config)


def text_config(config: PreTrainedConfig) -> ConfigDict:
    """Return the configuration of the text model in a model's configuration.

    Its `model_type` is that of the plain text model, such as qwen2, and its RoPE has one position per token.
    """
    whole: ConfigDict = config.to_dict()
    text: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    text |= {key: whole[key] for key in WHOLE_MODEL_KEYS if key in whole}
    if text["model_type"] not in TEXT_FAMILIES:
        return text
    rope = {key: value for key, value in text["rope_parameters"].items() if key not in THREE_POSITION_KEYS}
    return {**text, "model_type": TEXT_FAMILIES[text["model_type"]], "rope_parameters": rope}


def rope_type(parameters: ConfigDict) -> str:
    """Return the type of RoPE scaling in transformers' `rope_parameters`, `none` for plain RoPE."""
    name = str(parameters.get("rope_type", "default"))
    return "none" if name == "default" else name


def text_name(name: str) -> str:
    """Return the name in the causal language model of a checkpoint's parameter.

    Its own name may have a prefix of a model for images, or, in a model without a head, none.
    """
    name = _TEXT_MODEL_PREFIX.sub("", name, count=1)
    return f"model.{name}" if name.startswith(DECODER_PARTS) else name
