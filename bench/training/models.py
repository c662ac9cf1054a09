"""Transformers' own Qwen3, Qwen2, Llama and Mistral classes, built from the numbers in conf/model/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
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

from bench.config import ModelConfig
from bench.training.text_model import BY_LENGTH, text_numbers
from bench.training.weights import filled_layers, numbers_of

FAMILIES: Mapping[str, tuple[type[Any], type[Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def empty_model(config: ModelConfig, *, attention_name: str, max_positions: int) -> PreTrainedModel:
    """The causal language model on the meta device, in the current default dtype: shapes and no numbers.

    It is for sequences of `max_positions` tokens: what a configuration lets follow from the length is set.
    """
    config_class, model_class = FAMILIES[config.family]
    if config.path is not None:
        stored = json.loads((Path(config.path) / "config.json").read_text())
        numbers = config_class.from_dict(text_numbers(stored))
        _set_length(numbers, max_positions)
    else:
        numbers = _transformers_config(config_class, config, max_positions)
    numbers._attn_implementation = attention_name
    with torch.device("meta"):
        model: PreTrainedModel = model_class(numbers)
    model.tie_weights()  # transformers 5.0 ties none on the meta device
    return model


def _set_length(numbers: Any, tokens: int) -> None:
    """Leave out a window that hides none of so many tokens, and have rotary frequencies for all of them.

    transformers chooses some by the largest position that it is given, of which every rank has another.
    """
    if (getattr(numbers, "sliding_window", None) or 0) >= tokens:
        numbers.sliding_window, numbers.layer_types = None, ["full_attention"] * numbers.num_hidden_layers
    kind = numbers.rope_parameters.get("rope_type")
    if kind in BY_LENGTH:
        fixed = f"{kind.replace('dynamic', 'ntk')} of {tokens} tokens"  # no name that is chosen for
        ROPE_INIT_FUNCTIONS[fixed] = partial(ROPE_INIT_FUNCTIONS[kind], seq_len=torch.tensor(tokens))
        numbers.rope_parameters["rope_type"] = fixed


def build_model(
    config: ModelConfig,
    *,
    attention_name: str,
    max_positions: int,
    seed: int,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """The whole model on one device, in the current default dtype.

    Random weights depend on `seed`, and on whether `device` is a GPU; engines shard the same. With
    `config.path` the weights come from that local folder.
    """
    model = empty_model(config, attention_name=attention_name, max_positions=max_positions)
    for _ in filled_layers(model, numbers_of(config, seed), device or torch.device("cpu")):
        pass
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
        sliding_window=None,
        max_position_embeddings=max_positions,
        use_cache=False,
        pad_token_id=None,
    )


class WideSumEmbedding(nn.Embedding):
    """The library's embedding, but for the sums of its gradient where the weight is bf16 or fp16: in float32.

    torch's own backward adds up the rows of a token in the gradient's dtype on a CPU: in bf16 a token that
    occurs some hundred times gets no more from the next one, and of 64k tokens a third of the gradient is
    lost. On a GPU torch sums in float32 itself, so nothing of this is used there.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the library's name
        if self.weight.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(input)
        found: Tensor = _Lookup.apply(self.weight, input, self.padding_idx)  # type: ignore[no-untyped-call]
        return found


def sum_embedding_gradient_in_float32(model: PreTrainedModel) -> None:
    """Replace the model's input embedding; its weight, and whatever is tied to it, stays the same tensor."""
    old: Any = model.get_input_embeddings()
    new = WideSumEmbedding(
        old.num_embeddings, old.embedding_dim, padding_idx=old.padding_idx, _weight=old.weight
    )
    new.weight = old.weight
    model.set_input_embeddings(new)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        # Not the weight itself: ZeRO-3 has given it back by the time of backward.
        ctx.num_tokens, ctx.padding_idx = len(weight_VH), -1 if padding_idx is None else padding_idx
        return embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        wide_VH = torch.ops.aten.embedding_dense_backward(
            grad.float(), ids, ctx.num_tokens, ctx.padding_idx, scale_grad_by_freq=False
        )
        return wide_VH.to(grad.dtype), None, None
