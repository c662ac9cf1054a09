"""Number of weights of a model and of its parts, and a list of its trained tensors. Must not import torch.

Tensors are listed by module, in the order of transformers' forward pass. Engines that shard parameters gather
and reduce them tensor by tensor or layer by layer, and pad every tensor separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.config import DTYPE_BYTES, Cell, ModelConfig

HEAD_NORM_FAMILIES = ("qwen3",)
"""Families whose models normalise every head of Q and K."""
FLOAT32_BYTES = 4


def state_dtype_bytes(cell: Cell) -> int:
    """Return the bytes of an element of optimizer state or of a sum over ranks, float32 at least."""
    return max(FLOAT32_BYTES, DTYPE_BYTES[cell.dtype])


def q_size(model: ModelConfig) -> int:
    """Return the number of elements of all query heads of one token."""
    return model.num_heads * model.head_dim


def kv_size(model: ModelConfig) -> int:
    """Return the number of elements of all KV heads of one token, in K or in V."""
    return model.num_kv_heads * model.head_dim


def parameters(model: ModelConfig) -> int:
    """Return the number of all trained weights."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    head_norms = 2 * model.head_dim if model.family in HEAD_NORM_FAMILIES else 0
    biases = q_size(model) + 2 * kv_size(model) if model.attention_bias else 0
    norms = model.num_layers * (2 * model.hidden_size + head_norms + biases) + model.hidden_size
    return layer_parameters(model) + embeddings + norms


def matrix_parameters(model: ModelConfig) -> int:
    """Return the number of weights of all layers' projections and of the output head."""
    return layer_parameters(model) + head_parameters(model)


def head_parameters(model: ModelConfig) -> int:
    """Return the number of weights of the output head."""
    return model.hidden_size * model.vocab_size


def layer_parameters(model: ModelConfig) -> int:
    """Return the number of weights of all layers' projections, in attention and MLPs."""
    attention = model.hidden_size * (2 * q_size(model) + 2 * kv_size(model))
    return model.num_layers * attention + mlp_parameters(model)


def mlp_parameters(model: ModelConfig) -> int:
    """Return the number of weights of all layers' MLPs."""
    return model.num_layers * 3 * model.hidden_size * model.intermediate_size


def one_layer_parameters(model: ModelConfig) -> int:
    """Return the number of weights of one layer's projections."""
    return layer_parameters(model) // model.num_layers


def mlp_output_parameters(model: ModelConfig) -> int:
    """Return the number of weights of the output projection of one layer's MLP."""
    return model.hidden_size * model.intermediate_size


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """Shape of one trained weight or bias. A tied weight has the same name in both of its modules."""

    name: str
    rows: int
    """Size of the first dimension."""
    columns: int = 1

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


Modules = tuple[tuple[TrainedTensor, ...], ...]
"""Tensors of several modules, one tuple for each module."""


def embedding(model: ModelConfig) -> TrainedTensor:
    """Return the weight of the input embedding."""
    return TrainedTensor("embedding", model.vocab_size, model.hidden_size)


def head(model: ModelConfig) -> TrainedTensor:
    """Return the weight of the output head; in a model with tied embeddings it is the embedding's weight."""
    return embedding(model) if model.tied_embeddings else replace(embedding(model), name="head")


def last_norm(model: ModelConfig) -> TrainedTensor:
    """Return the weight of the norm before the output head."""
    return TrainedTensor("last norm", model.hidden_size)


def layer_modules(model: ModelConfig, layer: int = 0) -> Modules:
    """Return the tensors of one layer by module, in the order of the forward pass."""
    h, f = model.hidden_size, model.intermediate_size

    def weight(name: str, rows: int, columns: int = 1) -> tuple[TrainedTensor, ...]:
        return (TrainedTensor(f"{layer} {name}", rows, columns),)

    def projection(name: str, rows: int) -> tuple[TrainedTensor, ...]:
        return weight(name, rows, h) + (weight(f"{name} bias", rows) if model.attention_bias else ())

    def head_norm(name: str) -> Modules:
        return (weight(name, model.head_dim),) if model.family in HEAD_NORM_FAMILIES else ()

    return (
        weight("norm", h),
        projection("q", q_size(model)), *head_norm("q norm"),
        projection("k", kv_size(model)), *head_norm("k norm"),
        projection("v", kv_size(model)),
        weight("out", h, q_size(model)),
        weight("mlp norm", h),
        weight("gate", f, h), weight("up", f, h), weight("down", h, f),
    )  # fmt: skip


def flatten_modules(modules: Modules) -> tuple[TrainedTensor, ...]:
    """Return the tensors of all modules in one tuple."""
    return tuple(tensor for module in modules for tensor in module)


def tensors_outside_layers(model: ModelConfig) -> tuple[TrainedTensor, ...]:
    """Return the weights of the embedding, the last norm and, if it is not tied, the output head."""
    untied = () if model.tied_embeddings else (head(model),)
    return (embedding(model), last_norm(model), *untied)


def trained_tensors(model: ModelConfig) -> tuple[TrainedTensor, ...]:
    """Return every trained tensor once, in the order of the model's definition."""
    layers = (flatten_modules(layer_modules(model, layer)) for layer in range(model.num_layers))
    first, *last = tensors_outside_layers(model)
    return (first, *(tensor for layer in layers for tensor in layer), *last)


def tensors_in_backward(model: ModelConfig) -> Iterator[TrainedTensor]:
    """Yield every trained tensor once, in the order in which backward computes the gradients."""
    if not model.tied_embeddings:
        yield head(model)
    yield last_norm(model)
    for layer in reversed(range(model.num_layers)):
        yield from flatten_modules(tuple(reversed(layer_modules(model, layer))))
    yield embedding(model)
