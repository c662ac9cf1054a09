"""The tensors that a model trains, by the modules that use them, in the order of transformers' forward pass.

Sharding engines gather and reduce them one by one or layer by layer, each padded on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.config import ModelConfig
from bench.cost.weights import HEAD_NORM_FAMILIES


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """One trained tensor; two modules that share one have equal names."""

    name: str
    rows: int
    """Its first dimension."""
    columns: int = 1

    @property
    def count(self) -> int:
        """Its numbers."""
        return self.rows * self.columns


Modules = tuple[tuple[TrainedTensor, ...], ...]
"""The tensors of each module, one module after another."""


def embedding(model: ModelConfig) -> TrainedTensor:
    """A row for each token of the vocabulary."""
    return TrainedTensor("embedding", model.vocab_size, model.hidden_size)


def head(model: ModelConfig) -> TrainedTensor:
    """The output head, which may be the embedding."""
    return embedding(model) if model.tied_embeddings else replace(embedding(model), name="head")


def last_norm(model: ModelConfig) -> TrainedTensor:
    """The norm before the output head."""
    return TrainedTensor("last norm", model.hidden_size)


def layer_modules(model: ModelConfig, layer: int = 0) -> Modules:
    """One layer's: a norm, Q, K and V, the output; a norm, the MLP."""
    h, f = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def one(name: str, rows: int, columns: int = 1) -> tuple[TrainedTensor, ...]:
        return (TrainedTensor(f"{layer} {name}", rows, columns),)

    def projection(name: str, rows: int) -> tuple[TrainedTensor, ...]:
        return one(name, rows, h) + (one(f"{name} bias", rows) if model.attention_bias else ())

    def head_norm(name: str) -> Modules:
        return (one(name, model.head_dim),) if model.family in HEAD_NORM_FAMILIES else ()

    return (
        one("norm", h),
        projection("q", q_size), *head_norm("q norm"),
        projection("k", kv_size), *head_norm("k norm"),
        projection("v", kv_size),
        one("out", h, q_size),
        one("mlp norm", h),
        one("gate", f, h), one("up", f, h), one("down", h, f),
    )  # fmt: skip


def in_modules(modules: Modules) -> tuple[TrainedTensor, ...]:
    """Those of all modules."""
    return tuple(tensor for module in modules for tensor in module)


def ends(model: ModelConfig) -> tuple[TrainedTensor, ...]:
    """Those of no layer."""
    untied = () if model.tied_embeddings else (head(model),)
    return (embedding(model), last_norm(model), *untied)


def trained_tensors(model: ModelConfig) -> tuple[TrainedTensor, ...]:
    """Each of the model's once, in the order of its definition."""
    layers = (in_modules(layer_modules(model, layer)) for layer in range(model.num_layers))
    first, *last = ends(model)
    return (first, *(tensor for layer in layers for tensor in layer), *last)
