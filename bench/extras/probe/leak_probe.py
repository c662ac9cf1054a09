"""The public function `probe`, which finds attention across documents or to later tokens.

Shapes: B sequences, S tokens of this rank's shard, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

NOISE_MARGIN = 4.0
"""Smallest difference of a moved position, as a multiple of the difference between two equal runs."""
MAX_DOCUMENTS = 4
"""Largest number of documents with changed tokens, not counting the longest document."""
SEED = 11


@dataclass(frozen=True, slots=True)
class Moved:
    """Numbers of positions that moved, that is changed by more than noise, when one token changed.

    They are summed over all changes and ranks.
    """

    other_outputs: int
    """Positions of other documents whose output moved."""
    other_gradients: int
    """Positions of other documents whose input's gradient moved."""
    other_positions: int
    """Compared positions of other documents."""
    earlier_outputs: int
    """Positions before the changed token, in its document, whose output moved."""
    earlier_positions: int
    """Compared positions before the changed token in its document."""
    own_outputs: int
    """Positions from the changed token on, in its document, whose output moved, as it should."""
    own_positions: int
    """Compared positions from the changed token on in its document."""


def probe(
    model: PreTrainedModel,
    input_ids: Tensor,
    documents: Tensor,
    positions: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    **named: Any,
) -> dict[str, Moved]:
    """Change one token at a time, and count the positions whose outputs and gradients change.

    This shows whether attention stays within documents and is causal, in the whole model and in every kind of
    layer. Nothing is trained, and no parameter changes. Call it on every rank of the group, in float32 or
    wider, before FSDP or DeepSpeed shards the parameters.

        moved = bench.probe(model, input_ids, documents, positions, group=group, position_ids=position_ids)
        assert all(kind.other_outputs == kind.earlier_outputs == 0 for kind in moved.values()), moved

    Args:
        model: A transformers model.
        input_ids: Token ids of this rank's shard, [batch, tokens].
        documents: Number of the document of every token, [batch, tokens].
        positions: Position of every token in the whole sequence, [batch, tokens]; counts from 0 by default.
        group: The ranks that share the sequences; None if no ranks do.
        **named: Further arguments of the model, such as `position_ids`.

    Returns:
        Counts of changed positions, summed over all changes and ranks, under "model" for the whole model and
        under the name of every kind of layer.
    """
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    whole: tuple[Tensor, ...] = (documents, positions)
    if group is not None:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, (documents.cpu(), positions.cpu()), group=group)
        whole = tuple(torch.cat(shards, dim=1) for shards in zip(*gathered, strict=True))
    changes = choose_changes(*whole)
    totals: dict[str, Tensor] = {}
    for part in model_parts(model, input_ids, named):
        totals[part.kind] = totals.get(part.kind, 0) + count_moved(part, documents, positions, changes)
    if group is not None:
        for total in totals.values():
            dist.all_reduce(total, group=group)
    return {kind: Moved(*total.tolist()) for kind, total in totals.items()}


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Part of the model that runs alone, with fixed inputs and fixed gradients of its outputs."""

    kind: str
    run: Callable[[Tensor], Tensor]
    """Forward from inputs to outputs, both [B, S, H]."""
    inputs: Tensor
    changed_inputs: Tensor
    """Inputs if all tokens were changed, [B, S, H]."""

    def outputs_and_gradients(self, is_changed_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the gradients of the inputs, both [B, S, H], in float64.

        Every rank must call it, with a mask of the tokens to change.
        """
        leaf = torch.where(is_changed_BS[..., None], self.changed_inputs, self.inputs).requires_grad_()
        out_BSH = self.run(leaf)
        generator = torch.Generator().manual_seed(SEED)
        cotangent = torch.randn(out_BSH.shape, generator=generator, dtype=torch.float64).to(out_BSH)
        (gradient,) = torch.autograd.grad(out_BSH, leaf, cotangent)
        return out_BSH.detach().double(), gradient.double()


def choose_changes(documents: Tensor, positions: Tensor) -> list[tuple[int, int]]:
    """Return document and position of the tokens to change: first, middle and last of sampled documents.

    The documents are spread evenly and include the longest. All shards after the first token see it. The last
    token is changed because a layer with a decaying state or a short convolution would leak only the last
    tokens into the next document.
    """
    numbers, sizes = documents.unique(return_counts=True)
    spread = torch.linspace(0, len(numbers) - 1, min(MAX_DOCUMENTS, len(numbers))).round().int().tolist()
    changes = []
    for number in numbers[sorted({*spread, int(sizes.argmax())})].tolist():
        tokens = positions[documents == number].sort().values.tolist()
        changes += [
            (number, position) for position in sorted({tokens[0], tokens[len(tokens) // 2], tokens[-1]})
        ]
    return changes


def model_parts(model: PreTrainedModel, input_ids: Tensor, named: Mapping[str, Any]) -> list[ModelPart]:
    """Return the whole model without its head, and each layer with the inputs that it gets in the model.

    Every rank must call it. In the whole model, a token changes to another token. In a layer, its hidden
    state is rolled by one feature.
    """
    decoder, config = model.get_decoder(), model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    embed, layers = model.get_input_embeddings(), []

    def run_model(embedded: Tensor) -> Tensor:
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **named).last_hidden_state
        return hidden

    def record_call(kind: str, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        others = dict(keywords)
        hidden = args[0] if args else others.pop("hidden_states")
        layers.append(ModelPart(kind, partial(_run_layer, layer, others), hidden, hidden.roll(1, dims=-1)))

    with ExitStack() as hooks, torch.no_grad():
        for kind, layer in zip(kinds, decoder.layers, strict=True):
            hook = layer.register_forward_pre_hook(partial(record_call, kind), with_kwargs=True)
            hooks.enter_context(hook)
        embedded = embed(input_ids)
        changed = embed((input_ids + config.vocab_size // 2) % config.vocab_size)
        run_model(embedded)
    return [ModelPart("model", run_model, embedded, changed), *layers]


def _run_layer(layer: nn.Module, keywords: Mapping[str, Any], hidden: Tensor) -> Tensor:
    output = layer(hidden, **keywords)
    return output if isinstance(output, Tensor) else output[0]


def count_moved(
    part: ModelPart, documents: Tensor, positions: Tensor, changes: Iterable[tuple[int, int]]
) -> Tensor:
    """Return this rank's sums over all changes in the order of `Moved`'s fields; every rank must call it."""
    nothing = torch.zeros_like(documents, dtype=torch.bool)
    unchanged, repeated = part.outputs_and_gradients(nothing), part.outputs_and_gradients(nothing)
    limits = [NOISE_MARGIN * (a - b).abs().max() for a, b in zip(unchanged, repeated, strict=True)]
    counts = []
    for document, position in changes:
        own = documents == document
        earlier = own & (positions < position)
        later = own & ~earlier
        changed = part.outputs_and_gradients(own & (positions == position))
        outputs_BS, gradients_BS = (
            ~((a - b).abs() <= limit).all(-1)  # nan counts as moved
            for a, b, limit in zip(unchanged, changed, limits, strict=True)
        )
        masks = (
            *(outputs_BS & ~own, gradients_BS & ~own, ~own),
            *(outputs_BS & earlier, earlier, outputs_BS & later, later),
        )
        counts.append(torch.stack([mask.sum() for mask in masks]))
    return torch.stack(counts).sum(0)
