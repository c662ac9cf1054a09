"""What moves in a model, and in each of its layers by itself, when one token changes.

A layer is given the same inputs and the same gradients of its outputs twice, but for one token. Attention
that stays within documents and is causal then moves nothing but that token's document from the token on, and
in backward nothing but that document: to the last bit, where the computation is deterministic.

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
"""A difference counts beyond so many times that of two equal runs."""
PLAIN = "full_attention"
"""What layers are called where the configuration has no list of kinds."""
MAX_DOCUMENTS = 4
"""Of so many documents tokens are changed, and of the longest."""
SEED = 11


@dataclass(frozen=True, slots=True)
class Places:
    """Where this rank's tokens stand, both [B, S]."""

    documents: Tensor
    """A number for each document, of all sequences."""
    positions: Tensor
    """In the sequence, from 0, whatever the documents."""


@dataclass(frozen=True, slots=True)
class TokenChange:
    """The token to be changed; only the rank that holds it changes it."""

    document: int
    position: int


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of the model that is run by itself, from fixed inputs and fixed gradients of its outputs.

    `others` is what an input is changed to, [B, S, H] as `inputs` is.
    """

    kind: str
    run: Callable[[Tensor], Tensor]
    inputs: Tensor
    others: Tensor

    def passed(self, places: Places, change: TokenChange | None = None) -> tuple[Tensor, Tensor]:
        """Outputs and gradients of the inputs, both [B, S, H], as doubles; every rank must call it."""
        leaf = self.inputs.clone()
        if change is not None:
            here = places.positions == change.position
            here &= places.documents == change.document
            leaf[here] = self.others[here]
        leaf.requires_grad_()
        out_BSH = self.run(leaf)
        (gradient,) = torch.autograd.grad(out_BSH, leaf, _cotangent(out_BSH, places))
        return out_BSH.detach().double(), gradient.double()


def changes_of(places: Places) -> list[TokenChange]:
    """The middle and the last token of some documents, spread over all; `places` are whole sequences'.

    A state that decays, or a short convolution, crosses from a document's last tokens alone.
    """
    documents, positions = places.documents.flatten(), places.positions.flatten()
    numbers, sizes = documents.unique(return_counts=True)
    spread = range(min(MAX_DOCUMENTS, len(numbers)))
    chosen = {round(each * (len(numbers) - 1) / max(1, len(spread) - 1)) for each in spread}
    changes = []
    for number in numbers[sorted({*chosen, int(sizes.argmax())})].tolist():
        own = positions[documents == number].sort().values
        changes += [
            TokenChange(number, position) for position in sorted({int(own[len(own) // 2]), int(own[-1])})
        ]
    return changes


def parts_of(model: PreTrainedModel, input_ids: Tensor, named: Mapping[str, Any]) -> list[ModelPart]:
    """The whole model, and each of its layers with what it is given there; every rank must call it.

    A token is changed to another one. `named` is what else the model is called with.
    """
    decoder, numbers = model.get_decoder(), model.config.get_text_config()
    kinds = getattr(numbers, "layer_types", None) or [PLAIN] * len(decoder.layers)
    embed, vocabulary = model.get_input_embeddings(), numbers.vocab_size

    def through_all(embedded: Tensor) -> Tensor:
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **named).last_hidden_state
        return hidden

    with _called(decoder.layers) as calls, torch.no_grad():
        embedded, others = embed(input_ids), embed((input_ids + vocabulary // 2) % vocabulary)
        through_all(embedded)
    layers = [
        ModelPart(kind, _call(layer, given), hidden, hidden.roll(1, dims=-1))
        for kind, layer, (hidden, given) in zip(kinds, decoder.layers, calls, strict=True)
    ]
    return [ModelPart(MODEL, through_all, embedded, others), *layers]


def leaks(
    parts: Iterable[ModelPart], places: Places, changes: Sequence[TokenChange]
) -> tuple[dict[str, Tensor], float]:
    """Run every part twice as it is and once for each change, and count; every rank must call it.

    Returns what this rank counted, by the kind of part a row as `Moved` has it, and the noise of equal runs.
    """
    counts: dict[str, Tensor] = {}
    noise = 0.0
    for part in parts:
        before, again = part.passed(places), part.passed(places)
        noises = [float((a - b).abs().max()) for a, b in zip(before, again, strict=True)]
        noise = max(noise, *noises)
        for change in changes:
            after = part.passed(places, change)
            differs = [
                ~((a - b).abs() <= NOISE_MARGIN * own).all(-1)  # what is no number has moved, too
                for a, b, own in zip(before, after, noises, strict=True)
            ]
            row = _counted(differs[0], differs[1], places, change)
            counts[part.kind] = counts.get(part.kind, torch.zeros_like(row)) + row
    return counts, noise


def _counted(outputs_BS: Tensor, gradients_BS: Tensor, places: Places, change: TokenChange) -> Tensor:
    """The numbers of `Moved`, in its order."""
    own = places.documents == change.document
    earlier = own & (places.positions < change.position)
    later = own & ~earlier
    masks = (
        outputs_BS & ~own, gradients_BS & ~own, ~own,
        outputs_BS & earlier, earlier,
        outputs_BS & later, later,
    )  # fmt: skip
    return torch.stack([mask.sum() for mask in masks])


def _cotangent(out_BSH: Tensor, places: Places) -> Tensor:
    """A drawn gradient for every output, the same in every run."""
    generator = torch.Generator().manual_seed(SEED + int(places.positions[0, 0]))
    drawn = torch.randn(out_BSH.shape, generator=generator, dtype=torch.float64)
    return drawn.to(out_BSH.device, out_BSH.dtype)


@contextmanager
def _called(layers: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
    """The hidden states and the other arguments that each layer is called with, in the layers' order."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def note(_layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        hidden = args[0] if args else named.pop("hidden_states")
        calls.append((hidden.detach(), named))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _call(layer: nn.Module, named: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        made = layer(hidden, **named)
        return made if isinstance(made, Tensor) else made[0]

    return run
