"""Transformers' own Qwen3, Qwen2 and Llama classes, built from the numbers in conf/model/."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.config import ModelConfig

FAMILIES: Mapping[str, tuple[type[Any], type[Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def build_model(
    config: ModelConfig,
    *,
    attention_name: str,
    max_positions: int,
    seed: int,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """The causal language model, in the current default dtype; on a GPU where that draws its weights.

    Random weights are the same on every rank of any sharding: they depend on `seed`, and on whether `device`
    is a GPU. With `config.path` the weights come from that local folder.
    """
    if config.path is not None:
        return AutoModelForCausalLM.from_pretrained(
            config.path,
            attn_implementation=attention_name,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.get_default_dtype(),
        )
    config_class, model_class = FAMILIES[config.family]
    # A GPU draws a billion random weights in no time, a core in a quarter of a minute.
    with device if device is not None and device.type == "cuda" else nullcontext():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(
            _transformers_config(config_class, config, attention_name, max_positions)
        )
    return model


def _transformers_config(
    config_class: type[Any], config: ModelConfig, attention_name: str, max_positions: int
) -> Any:
    built = config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tied_embeddings,
        attention_bias=config.attention_bias,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=max_positions,
        use_cache=False,
        pad_token_id=None,
    )
    built._attn_implementation = attention_name
    return built
