"""Qwen3, Qwen2, Llama and Mistral models of transformers, built from conf/model/ or a local checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bench.config import NOT_USED, ModelConfig
from bench.training.text_model import LENGTH_DEPENDENT_ROPE, LISTED_FACTORS, read_config, rope_type
from bench.training.weights import fill_layers, model_weights

FAMILIES: Mapping[str, tuple[type[Any], type[Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
LLAMA3_FREQUENCIES: Mapping[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Settings of `model.rope_scaling=llama3` that Llama 3.1's config.json has."""
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def empty_model(config: ModelConfig, *, attention_name: str, max_positions: int) -> PreTrainedModel:
    """Return the causal language model on the meta device, in the current default dtype.

    Args:
        config: Sizes of the model, or the path of a checkpoint.
        attention_name: Name of the attention function in transformers' registry.
        max_positions: Length of the sequences, to which settings that depend on the length are fixed.
    """
    config_class, model_class = FAMILIES[config.family]
    if config.path is not None:
        settings = config_class.from_dict(read_config(Path(config.path)))
    else:
        settings = _transformers_config(config_class, config, max_positions)
    _set_rope_scaling(settings, config, max_positions)
    _set_length(settings, max_positions)
    settings._attn_implementation = attention_name
    settings.use_cache = False  # with a cache transformers masks no packed documents
    with torch.device("meta"):
        model: PreTrainedModel = model_class(settings)
    return model


@cache
def parameter_shapes(config: ModelConfig) -> Mapping[str, list[int]]:
    """Return the shapes of a model's parameters by name; a tied parameter has two names."""
    model = empty_model(config, attention_name="sdpa", max_positions=1)
    return {name: [*parameter.shape] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _set_rope_scaling(settings: Any, config: ModelConfig, tokens: int) -> None:
    """Replace the RoPE parameters of a model unless they are those that its cell asks for.

    A factor of None extends the model to `tokens` tokens. Further parameters of the same type are kept.
    """
    rope = settings.rope_parameters
    stored_len = rope.get("original_max_position_embeddings", settings.max_position_embeddings)
    stored = rope_type(rope), rope.get("factor"), stored_len
    is_stored = stored == (config.rope_scaling, config.rope_factor, config.trained_len)
    if is_stored or config.rope_scaling == LISTED_FACTORS:  # only a config.json can list them
        return
    plain = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling == NOT_USED or config.trained_len is None:
        settings.rope_parameters = plain
        return
    factor = config.rope_factor or max(1.0, tokens / config.trained_len)
    settings.max_position_embeddings = config.trained_len  # from which every scaling starts
    if rope_type(rope) != config.rope_scaling:
        rope = {**plain, **(LLAMA3_FREQUENCIES if config.rope_scaling == "llama3" else {})}
    scaled = {**rope, "rope_type": config.rope_scaling, "factor": factor}
    scaled.pop("original_max_position_embeddings", None)
    settings.rope_parameters = scaled


def _set_length(settings: Any, tokens: int) -> None:
    """Fix the settings of a model that depend on the length of a sequence to `tokens`.

    A sliding window of at least `tokens` is removed, because it hides nothing. Some rotary frequencies depend
    on the largest position in a forward pass, which differs between ranks; they become those of `tokens`
    positions.
    """
    if (getattr(settings, "sliding_window", None) or 0) >= tokens:
        settings.sliding_window = None
        if hasattr(settings, "layer_types"):
            settings.layer_types = ["full_attention"] * settings.num_hidden_layers
    scaling = settings.rope_parameters.get("rope_type")
    if scaling in LENGTH_DEPENDENT_ROPE:
        # The new name keeps transformers from updating the frequencies in every forward pass.
        fixed_type = f"{scaling.replace('dynamic', 'ntk')} of {tokens} tokens"
        ROPE_INIT_FUNCTIONS[fixed_type] = partial(ROPE_INIT_FUNCTIONS[scaling], seq_len=torch.tensor(tokens))
        settings.rope_parameters["rope_type"] = fixed_type


def build_model(
    config: ModelConfig,
    *,
    attention_name: str,
    max_positions: int,
    seed: int,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Return the whole model on one device (the CPU by default), in the current default dtype.

    Weights come from the folder `config.path`. Without it they are random and depend on `seed` and on whether
    `device` is a GPU. Engines shard the same weights.
    """
    model = empty_model(config, attention_name=attention_name, max_positions=max_positions)
    deque(fill_layers(model, model_weights(config, seed), device or torch.device("cpu")), maxlen=0)
    return model


def _transformers_config(config_class: type[Any], config: ModelConfig, max_positions: int) -> Any:
    return config_class(
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
        initializer_range=config.init_std,
        sliding_window=None,
        max_position_embeddings=max_positions,
        pad_token_id=None,
    )


class WideSumEmbedding(nn.Embedding):
    """Embedding that sums the gradient of a bf16 or fp16 weight in float32.

    On a CPU, torch sums the gradients of all occurrences of a token in the dtype of the gradient. In bf16 the
    sum stops growing after some hundred occurrences; with 64k tokens a third of the gradient is lost. On a
    GPU torch sums in float32, so this class is not used there.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        if self.weight.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(input)
        vectors: Tensor = _WideSumLookup.apply(self.weight, input, self.padding_idx)  # type: ignore[no-untyped-call]
        return vectors


def sum_embedding_gradient_in_float32(model: PreTrainedModel) -> None:
    """Replace a model's input embedding by a WideSumEmbedding of the same weight, so that ties remain."""
    old: Any = model.get_input_embeddings()
    new = WideSumEmbedding(
        old.num_embeddings, old.embedding_dim, padding_idx=old.padding_idx, _weight=old.weight
    )
    new.weight = old.weight
    model.set_input_embeddings(new)


class _WideSumLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        # The weight itself is not saved, because ZeRO-3 frees it before backward.
        ctx.num_tokens, ctx.padding_idx = len(weight_VH), -1 if padding_idx is None else padding_idx
        return embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        wide_VH = torch.ops.aten.embedding_dense_backward(
            grad.float(), ids, ctx.num_tokens, ctx.padding_idx, scale_grad_by_freq=False
        )
        return wide_VH.to(grad.dtype), None, None
