"""Positions that move in a model, and in each of its layers run alone, when one token changes.

A position moves if its output, or the gradient of its input, changes by more than noise. A layer runs twice
with inputs that differ in one token, and with equal gradients of its outputs. If attention is causal and
stays within documents, outputs move only in the token's document from the token on, and gradients only in
that document. All other positions are equal to the last bit if the computation is deterministic.

Shapes: B sequences, S tokens of this rank's shard, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.measure.probe.section import MODEL

NOISE_MARGIN = 4.0
"""Smallest difference of a moved position, as a multiple of the difference between two equal runs."""
PLAIN = "full_attention"
"""Kind of every layer if the model's configuration has no `layer_types`."""
MAX_DOCUMENTS = 4
"""Largest number of documents with changed tokens, not counting the longest document."""
SEED = 11


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Document and position of each token of this rank's shard."""

    documents: Tensor
    """Number of each token's document over all sequences, [B, S]."""
    positions: Tensor
    """Position of each token in its sequence from 0, [B, S]; it does not restart in a document."""


@dataclass(frozen=True, slots=True)
class TokenChange:
    """Token to be changed; only the rank that holds it changes it."""

    document: int
    """Number of the token's document over all sequences."""
    position: int
    """Position of the token in its sequence."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Part of the model that runs by itself, with fixed inputs and fixed gradients of its outputs."""

    kind: str
    """Kind of layer, or MODEL for the whole model."""
    run: Callable[[Tensor], Tensor]
    """Forward from inputs to outputs, both [B, S, H]."""
    inputs: Tensor
    """Inputs before the change, [B, S, H]."""
    changed_inputs: Tensor
    """Inputs after the change, if all tokens were changed, [B, S, H]."""

    def outputs_and_gradients(
        self, places: TokenPlaces, change: TokenChange | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward, with one token changed if `change` is given; every rank must call it.

        Return the outputs and the gradients of the inputs, both [B, S, H], in float64.
        """
        leaf = self.inputs.clone()
        if change is not None:
            is_changed = places.positions == change.position
            is_changed &= places.documents == change.document
            leaf[is_changed] = self.changed_inputs[is_changed]
        leaf.requires_grad_()
        out_BSH = self.run(leaf)
        (gradient,) = torch.autograd.grad(out_BSH, leaf, _cotangent(out_BSH, places))
        return out_BSH.detach().double(), gradient.double()


def choose_changes(places: TokenPlaces) -> list[TokenChange]:
    """Return the middle and the last token of sampled documents; `places` are those of whole sequences.

    The sampled documents are spread evenly and include the longest. The last token is changed because a layer
    with a decaying state or a short convolution would leak only the last tokens into the next document.
    """
    documents, positions = places.documents.flatten(), places.positions.flatten()
    numbers, sizes = documents.unique(return_counts=True)
    count = min(MAX_DOCUMENTS, len(numbers))
    chosen = {round(index * (len(numbers) - 1) / max(1, count - 1)) for index in range(count)}
    changes = []
    for number in numbers[sorted({*chosen, int(sizes.argmax())})].tolist():
        tokens = positions[documents == number].sort().values
        middle, last = int(tokens[len(tokens) // 2]), int(tokens[-1])
        changes += [TokenChange(number, position) for position in sorted({middle, last})]
    return changes


def model_parts(model: PreTrainedModel, input_ids: Tensor, named: Mapping[str, Any]) -> list[ModelPart]:
    """Return the whole model without its head, and each layer with the inputs that it gets in the model.

    Every rank must call it. `named` are further keyword arguments of the model. In the whole model, a token
    changes to another token. In a layer, its hidden state is rolled by one feature.
    """
    decoder, config = model.get_decoder(), model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [PLAIN] * len(decoder.layers)
    embed, vocabulary = model.get_input_embeddings(), config.vocab_size

    def run_model(embedded: Tensor) -> Tensor:
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **named).last_hidden_state
        return hidden

    with _recorded_calls(decoder.layers) as calls, torch.no_grad():
        embedded = embed(input_ids)
        changed = embed((input_ids + vocabulary // 2) % vocabulary)
        run_model(embedded)
    layers = [
        ModelPart(kind, _layer_function(layer, keywords), hidden, hidden.roll(1, dims=-1))
        for kind, layer, (hidden, keywords) in zip(kinds, decoder.layers, calls, strict=True)
    ]
    return [ModelPart(MODEL, run_model, embedded, changed), *layers]


def count_moved(
    parts: Iterable[ModelPart], places: TokenPlaces, changes: Sequence[TokenChange]
) -> tuple[dict[str, Tensor], float]:
    """Run every part twice without a change and once for each change; every rank must call it.

    Returns:
        This rank's counts by kind of part, as a tensor in the order of `Moved`'s fields, and the largest
        difference between two equal runs.
    """
    counts: dict[str, Tensor] = {}
    noise = 0.0
    for part in parts:
        unchanged, repeated = part.outputs_and_gradients(places), part.outputs_and_gradients(places)
        noises = [float((a - b).abs().max()) for a, b in zip(unchanged, repeated, strict=True)]
        noise = max(noise, *noises)
        for change in changes:
            changed = part.outputs_and_gradients(places, change)
            outputs_moved, gradients_moved = (
                ~((a - b).abs() <= NOISE_MARGIN * own_noise).all(-1)  # nan counts as moved
                for a, b, own_noise in zip(unchanged, changed, noises, strict=True)
            )
            change_counts = _count_positions(outputs_moved, gradients_moved, places, change)
            counts[part.kind] = counts.get(part.kind, torch.zeros_like(change_counts)) + change_counts
    return counts, noise


def _count_positions(
    outputs_BS: Tensor, gradients_BS: Tensor, places: TokenPlaces, change: TokenChange
) -> Tensor:
    """Return the numbers of moved and compared positions in the order of `Moved`'s fields.

    `outputs_BS` and `gradients_BS` are True for positions that moved.
    """
    own = places.documents == change.document
    earlier = own & (places.positions < change.position)
    later = own & ~earlier
    masks = (
        outputs_BS & ~own, gradients_BS & ~own, ~own,
        outputs_BS & earlier, earlier,
        outputs_BS & later, later,
    )  # fmt: skip
    return torch.stack([mask.sum() for mask in masks])


def _cotangent(out_BSH: Tensor, places: TokenPlaces) -> Tensor:
    """Return a random gradient of the outputs that is equal in all runs."""
    generator = torch.Generator().manual_seed(SEED + int(places.positions[0, 0]))
    gradient = torch.randn(out_BSH.shape, generator=generator, dtype=torch.float64)
    return gradient.to(out_BSH.device, out_BSH.dtype)


@contextmanager
def _recorded_calls(layers: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
    """Record the hidden states and the keyword arguments of each layer's calls, in the order of the calls."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def record_call(_layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        keywords = dict(keywords)
        hidden = args[0] if args else keywords.pop("hidden_states")
        calls.append((hidden.detach(), keywords))

    hooks = [layer.register_forward_pre_hook(record_call, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _layer_function(layer: nn.Module, keywords: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        output = layer(hidden, **keywords)
        return output if isinstance(output, Tensor) else output[0]

    return run
