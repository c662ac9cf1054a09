"""How many numbers a model has, by what holds them."""

from __future__ import annotations

from bench.config import ModelConfig

HEAD_NORM_FAMILIES = ("qwen3",)
"""Models that normalise each head of Q and K."""


def q_size(model: ModelConfig) -> int:
    """Numbers of all query heads of one token."""
    return model.num_heads * model.head_dim


def kv_size(model: ModelConfig) -> int:
    """Those of all KV heads."""
    return model.num_kv_heads * model.head_dim


def parameters(model: ModelConfig) -> int:
    """All numbers that are trained."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    head_norms = 2 * model.head_dim if model.family in HEAD_NORM_FAMILIES else 0
    biases = q_size(model) + 2 * kv_size(model) if model.attention_bias else 0
    norms = model.num_layers * (2 * model.hidden_size + head_norms + biases) + model.hidden_size
    return layer_parameters(model) + embeddings + norms


def matrix_parameters(model: ModelConfig) -> int:
    """Weights that multiply activations: all layers' projections and the output head."""
    return layer_parameters(model) + head_parameters(model)


def head_parameters(model: ModelConfig) -> int:
    """Weights of the output head."""
    return model.hidden_size * model.vocab_size


def layer_parameters(model: ModelConfig) -> int:
    """Weights of all layers' projections."""
    attention = model.hidden_size * (2 * q_size(model) + 2 * kv_size(model))
    return model.num_layers * attention + mlp_parameters(model)


def mlp_parameters(model: ModelConfig) -> int:
    """Weights of all layers' MLPs."""
    return model.num_layers * 3 * model.hidden_size * model.intermediate_size


def one_layer_parameters(model: ModelConfig) -> int:
    """Weights of one layer's projections."""
    return layer_parameters(model) // model.num_layers


def mlp_output_parameters(model: ModelConfig) -> int:
    """Weights of one layer's last projection."""
    return model.hidden_size * model.intermediate_size
