"""Parameters whose gradients are compared with float64, and the memory of the comparison. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bench.config import DTYPE_BYTES, LOW_PRECISION, Cell
from bench.training.parameters import head_parameters, one_layer_parameters, parameters

COMPUTATIONS = 5
"""Largest number of computations of the step: the exact one, three controls and a known mistake."""
COPIES = 4
"""Float64 tensors of a parameter's size that exist at once: values, gradient, sum of gradients,
difference."""
LOGIT_COPIES = 3
"""Tensors of one sequence's logits in float64 that exist at once: logits, their softmax and its gradient."""
SCORE_COPIES = 6
"""Tensors of one layer's scores in float64 that exist at once in backward."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Coverage:
    """Choice of parameters whose gradients are compared."""

    layers: tuple[int, ...]
    """Indices of the decoder layers whose parameters are compared."""
    has_ends: bool
    """True if the embedding, the final norm and the output head are compared."""
    num_layers: int
    """Number of decoder layers of the model."""

    @property
    def is_whole(self) -> bool:
        """True if every parameter is compared."""
        return self.has_ends and len(self.layers) == self.num_layers

    def __contains__(self, name: str) -> bool:
        """Return whether the gradient of the parameter of this name is compared."""
        layer = _LAYER.search(name)
        return self.has_ends if layer is None else int(layer[1]) in self.layers

    def __str__(self) -> str:
        """Return the choice in words, such as `layers 0, 18 and 35 of 36`."""
        *first, last = map(str, self.layers)
        layers = f"layers {', '.join(first)} and {last}" if first else f"layer {last}"
        ends = ", the embedding, the final norm and the head" if self.has_ends else ""
        return f"{layers} of {self.num_layers}{ends}"


def coverages(cell: Cell) -> Iterator[Coverage]:
    """Yield the choices from all parameters down to those of the first, the middle and the last layer."""
    count = cell.model.num_layers
    few = tuple(sorted({0, count // 2, count - 1}))
    yield Coverage(tuple(range(count)), has_ends=True, num_layers=count)
    yield Coverage(few, has_ends=True, num_layers=count)
    yield Coverage(few, has_ends=False, num_layers=count)


def needed_bytes(cell: Cell, tokens: int, coverage: Coverage) -> int:
    """Return the approximate bytes that the comparison takes on the device of rank 0.

    The cell's own model is not included. The compared model is computed layer by layer, so only the largest
    of three parts counts: one layer, the loss, and the gradients of the parameters outside of layers. The
    inputs of all layers are added to the first two.
    """
    model, exact_bytes = cell.model, DTYPE_BYTES["fp64"]
    states = (model.num_layers + 1) * cell.sequences_per_step * tokens * model.hidden_size
    # Hidden states are float32 under autocast.
    rounded_bytes = DTYPE_BYTES["fp32" if cell.dtype in LOW_PRECISION else cell.dtype]
    state_bytes = states * (exact_bytes + (COMPUTATIONS - 1) * rounded_bytes)
    ends = head_parameters(model) * (1 if model.tied_embeddings else 2)
    logits = exact_bytes * LOGIT_COPIES * model.vocab_size * tokens
    scores = exact_bytes * SCORE_COPIES * model.num_heads * tokens**2
    layer = exact_bytes * COPIES * one_layer_parameters(model) + scores
    loss = exact_bytes * ends + logits
    gradients = exact_bytes * COPIES * ends + logits if coverage.has_ends else 0
    return DTYPE_BYTES["fp32"] * ends + max(state_bytes + max(layer, loss), gradients)


def gradient_bytes(cell: Cell, coverage: Coverage) -> int:
    """Return the bytes of the compared gradients of the cell's engine, which rank 0 keeps in host memory."""
    ends = head_parameters(cell.model) * (1 if cell.model.tied_embeddings else 2)
    layers = (parameters(cell.model) - ends) * len(coverage.layers) // coverage.num_layers
    dtype_bytes = DTYPE_BYTES["fp64" if cell.dtype == "fp64" else "fp32"]
    return dtype_bytes * (layers + ends * coverage.has_ends)
