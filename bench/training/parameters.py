"""Number of weights of a model and of its parts, its trained tensors, and the bytes of each dtype. No torch.

Tensors are those of each module, in the order of transformers' forward pass: sharding engines gather and
reduce them one by one or layer by layer, each padded on its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.config import DTYPE_BYTES, Cell, ModelConfig

HEAD_NORM_FAMILIES = ("qwen3",)
"""Models that normalise each head of Q and K."""
FLOAT32_BYTES = 4


def wide_bytes(cell: Cell) -> int:
    """Return the bytes of a number of the optimizer, or of a sum over ranks."""
    return max(FLOAT32_BYTES, DTYPE_BYTES[cell.dtype])


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

    def one(name: str, rows: int, columns: int = 1) -> tuple[TrainedTensor, ...]:
        return (TrainedTensor(f"{layer} {name}", rows, columns),)

    def projection(name: str, rows: int) -> tuple[TrainedTensor, ...]:
        return one(name, rows, h) + (one(f"{name} bias", rows) if model.attention_bias else ())

    def head_norm(name: str) -> Modules:
        return (one(name, model.head_dim),) if model.family in HEAD_NORM_FAMILIES else ()

    return (
        one("norm", h),
        projection("q", q_size(model)), *head_norm("q norm"),
        projection("k", kv_size(model)), *head_norm("k norm"),
        projection("v", kv_size(model)),
        one("out", h, q_size(model)),
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


def in_backward(model: ModelConfig) -> Iterator[TrainedTensor]:
    """Yield each trained tensor once, in the order in which backward has its gradient."""
    if not model.tied_embeddings:
        yield head(model)
    yield last_norm(model)
    for layer in reversed(range(model.num_layers)):
        yield from in_modules(tuple(reversed(layer_modules(model, layer))))
    yield embedding(model)
