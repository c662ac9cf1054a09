"""The cell's whole model on one rank, layer by layer: loss and gradients of a step, exact and rounded.

All computations of the step go through one layer together, and a layer has numbers only meanwhile. So memory
holds one layer and the inputs of all, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bench.config import LOW_PRECISION
from bench.measure.objective.coverage import Coverage
from bench.measure.objective.gradient_noise import LOSS_BLOCK, StepLoss
from bench.measure.parity.exact import PLAIN_NAME, PlainAttention
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy
from bench.training.data import count_valid
from bench.training.engines import is_autocast
from bench.training.models import TORCH_DTYPES, empty_model, sum_embedding_gradient_in_float32
from bench.training.trainers.trainer import Trainer
from bench.training.weights import Filling, numbers_of

EXACT = "exact"
MISTAKEN = "mistaken"
CONTROLS = {f"control {parts}": parts for parts in (1, 2, 3)}
"""Computations that are equal in exact arithmetic: in how many parts each sums over the keys."""

Gradients = dict[str, Tensor]
"""Gradients by the names that parameters have in engines."""
Weights = Callable[[Batch], Tensor]
"""By how much each token's loss counts, [B, T]."""


@dataclass(frozen=True, slots=True)
class Computation:
    """One way to compute the step."""

    dtype: torch.dtype
    """Dtype of the weights."""
    autocast: torch.dtype | None
    """Dtype to which autocast rounds; None without autocast."""
    weights: Weights
    key_parts: int = 1


@dataclass(slots=True)
class _Sequence:
    """One sequence on its way through the layers in one computation."""

    batch: Batch
    keywords: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of each layer that transformers' model makes, such as rotary frequencies."""
    states: list[Tensor] = field(default_factory=list)
    """Input of each layer and output of the last, [B, T, H]; a layer's is dropped in its backward."""
    gradient: Tensor | None = None
    """Gradient of the input of the layer that backward reached last."""


class WholeModel:
    """The model as it is before any step, on this rank alone, and the sequences of the first step."""

    def __init__(
        self, trainer: Trainer, tokens: int, device: torch.device, attention: PlainAttention
    ) -> None:
        cell = trainer.cell
        self.cell, self.device, self.attention = cell, device, attention
        self.phase = trainer.phase
        self.sequences = trainer.data.whole_step(0, tokens)
        model = empty_model(cell.model, attention_name=PLAIN_NAME, max_positions=cell.seq_len).train()
        self.layers: list[nn.Module] = list(model.model.layers)
        self.filling = Filling(model, numbers_of(cell.model, cell.seed), device)
        self.filling.fill_ends()
        if device.type == "cpu":  # as the cell's
            sum_embedding_gradient_in_float32(model)
        self.named = _Named(model)
        self.ends = {name: each.detach() for name, each in self.named.named_parameters() if not each.is_meta}
        self.computations = {EXACT: Computation(torch.float64, None, _mean_over_tokens(self.sequences))}
        for name, parts in CONTROLS.items():
            self.computations[name] = self._rounded(parts, self.computations[EXACT].weights)
        if cell.sp_degree > 1 and cell.dtype in LOW_PRECISION:  # in others rounding hides no mistake
            self.computations[MISTAKEN] = self._rounded(1, mean_of_ranks(trainer.strategy, self.sequences))
        self.losses: dict[str, StepLoss] = {}
        """Loss of each computation; there once the first gradients are."""

    def gradients(self, coverage: Coverage) -> Iterator[tuple[str, Gradients]]:
        """Yield each computation's name and its gradients of one layer, exact ones first, layer by layer.

        The last layer comes first, and what is outside of layers last. Gradients are sums over the sequences,
        in float32 or float64.
        """
        running = {name: [_Sequence(each) for each in self.sequences] for name in self.computations}
        self._run_forward(running)
        for index in reversed(range(len(self.layers))):
            numbers = self._layer_numbers(index)
            is_wanted = any(name in coverage for name in numbers)
            for name, sequences in running.items():
                gradients = self._layer_backward(
                    index, numbers, self.computations[name], sequences, is_wanted=is_wanted
                )
                if is_wanted:
                    yield name, gradients
        if coverage.has_ends:
            for name, sequences in running.items():
                yield name, self._ends_gradients(self.computations[name], sequences)
        self.phase.enter(None)

    def _rounded(self, key_parts: int, weights: Weights) -> Computation:
        """Return a computation in the cell's dtype: weights have that dtype, or autocast rounds float32."""
        dtype = TORCH_DTYPES[self.cell.dtype]
        if is_autocast(self.cell):
            return Computation(torch.float32, dtype, weights, key_parts)
        return Computation(dtype, None, weights, key_parts)

    def _run_forward(self, running: Mapping[str, list[_Sequence]]) -> None:
        """Fill `states` and `keywords` of all sequences, then set their losses and first `gradient`."""
        self.phase.enter("forward")
        with torch.no_grad():
            for name, sequences in running.items():
                ends = _cast(self.ends, self.computations[name].dtype)
                for each in sequences:
                    with self._computing(self.computations[name], each.batch):
                        each.states.append(self._embedded(ends, each.batch))
                        each.keywords = _layer_keywords(
                            self.named.model.model, each.states[0], each.batch.position_ids
                        )
            for index in range(len(self.layers)):
                self.phase.enter("forward")  # a large model takes minutes on a CPU: the rank does not hang
                numbers = self._layer_numbers(index)
                for name, sequences in running.items():
                    weights = _cast(numbers, self.computations[name].dtype)
                    for each in sequences:
                        with self._computing(self.computations[name], each.batch):
                            each.states.append(self._layer(index, weights, each, each.states[index]))
        self.phase.enter("loss")
        for name, sequences in running.items():
            self.losses[name] = self._loss(self.computations[name], sequences)

    def _loss(self, computation: Computation, sequences: Sequence[_Sequence]) -> StepLoss:
        """Return the loss, and set the gradient of the last layer's output in each sequence."""
        ends, blocks = _cast(self.ends, computation.dtype), []
        for each in sequences:
            state = each.states[-1].detach().requires_grad_()
            with self._computing(computation, each.batch):
                losses = self._weighted_losses(ends, computation, each.batch, state)
                (each.gradient,) = torch.autograd.grad(losses.sum(), state)
            blocks += [block.detach().sum(dim=1) for block in losses.split(LOSS_BLOCK, dim=1)]
        sums = torch.cat(blocks).double()
        return StepLoss(float(sums.sum()), sums)

    def _layer_backward(
        self,
        index: int,
        numbers: Gradients,
        computation: Computation,
        sequences: Sequence[_Sequence],
        *,
        is_wanted: bool,
    ) -> Gradients:
        """Move each sequence's `gradient` to the layer's input; return those of the parameters if wanted."""
        self.phase.enter("backward")
        weights = _cast(numbers, computation.dtype, requires_grad=is_wanted)
        wanted, sums = weights if is_wanted else {}, Gradients()
        for each in sequences:
            state = each.states.pop(index).detach().requires_grad_()
            with self._computing(computation, each.batch):
                out = self._layer(index, weights, each, state)
                each.gradient, *own = torch.autograd.grad(out, [state, *wanted.values()], each.gradient)
            _add(sums, wanted, own)
        return sums

    def _ends_gradients(self, computation: Computation, sequences: Sequence[_Sequence]) -> Gradients:
        """Return the gradients of embedding, norm and head; of tied weights they are summed."""
        self.phase.enter("backward")
        ends, sums = _cast(self.ends, computation.dtype, requires_grad=True), Gradients()
        for each in sequences:
            with self._computing(computation, each.batch):
                losses = self._weighted_losses(ends, computation, each.batch, each.states[-1])
                outputs = [losses.sum(), self._embedded(ends, each.batch)]
                own = torch.autograd.grad(outputs, [*ends.values()], [None, each.gradient])
            _add(sums, ends, own)
        return sums

    def _layer_numbers(self, index: int) -> Gradients:
        """Return the parameters of a layer as built, by name; the model's own layer stays without numbers."""
        prefix = f"model.model.layers.{index}."
        return {prefix + name: each for name, each in self.filling.take(self.layers[index]).items()}

    def _layer(self, index: int, weights: Gradients, sequence: _Sequence, state: Tensor) -> Tensor:
        out: Tensor = self._call(weights, lambda _: self.layers[index](state, **sequence.keywords[index]))
        return out

    def _embedded(self, ends: Gradients, batch: Batch) -> Tensor:
        out: Tensor = self._call(ends, lambda model: model.get_input_embeddings()(batch.input_ids))
        return out

    def _weighted_losses(
        self, ends: Gradients, computation: Computation, batch: Batch, state: Tensor
    ) -> Tensor:
        """Return each token's part of the loss, [B, T], in float64; 0 where none counts."""
        logits = self._call(ends, lambda model: model.lm_head(model.model.norm(state)))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = cross_entropy(
            wide.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        )
        return losses.view_as(batch.labels) * computation.weights(batch)

    def _call(self, weights: Gradients, compute: Callable[[Any], Any]) -> Any:
        return functional_call(self.named, weights, (compute,))

    @contextmanager
    def _computing(self, computation: Computation, batch: Batch) -> Iterator[None]:
        """Let attention and autocast compute as the computation does, on the batch's documents."""
        self.attention.documents, self.attention.key_parts = batch.documents, computation.key_parts
        narrow = computation.autocast
        with torch.autocast(self.device.type, narrow, enabled=narrow is not None, cache_enabled=False):
            yield


class _Named(nn.Module):
    """A model whose parameters are named as in engines; it computes what it is given."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[PreTrainedModel], Any]) -> Any:
        return compute(self.model)


class _Recorder(nn.Module):
    """A layer that computes nothing and keeps the arguments that transformers' model gives it."""

    def forward(self, state: Tensor, **keywords: Any) -> Tensor:
        self.keywords = keywords
        return state


def _layer_keywords(model: Any, embedded: Tensor, position_ids: Tensor) -> list[dict[str, Any]]:
    """Return the arguments that the model's own forward gives to each of its layers."""
    layers, recorders = model.layers, [_Recorder() for _ in model.layers]
    model.layers = nn.ModuleList(recorders)
    try:
        model(inputs_embeds=embedded, position_ids=position_ids, use_cache=False)
    finally:
        model.layers = layers
    return [each.keywords for each in recorders]


def _cast(numbers: Gradients, dtype: torch.dtype, *, requires_grad: bool = False) -> Gradients:
    return {name: each.detach().to(dtype).requires_grad_(requires_grad) for name, each in numbers.items()}


def _add(sums: Gradients, names: Iterable[str], gradients: Iterable[Tensor]) -> None:
    """Add one sequence's gradients to the sums, in float32 or float64."""
    for name, gradient in zip(names, gradients, strict=True):
        own = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums[name] = sums[name] + own if name in sums else own


def _mean_over_tokens(sequences: Sequence[Batch]) -> Weights:
    """Every valid token of the step weighs the same: the objective."""
    valid = max(1, sum(int(count_valid(batch.labels)) for batch in sequences))
    return lambda batch: torch.full_like(batch.labels, 1 / valid, dtype=torch.float64)


def mean_of_ranks(strategy: Strategy, sequences: Sequence[Batch]) -> Weights:
    """Return a known mistake's weights: each rank's mean over its valid tokens, then the mean over ranks."""

    def weights(batch: Batch) -> Tensor:
        found = torch.zeros(batch.labels.shape, dtype=torch.float64, device=batch.labels.device)
        for rank in range(strategy.cell.sp_degree):
            pieces = strategy.facts.slices(strategy.cell, batch.labels.shape[1], rank)
            valid = sum(int(count_valid(batch.labels[:, piece])) for piece in pieces)
            for piece in pieces:
                found[:, piece] = 1 / (strategy.cell.sp_degree * len(sequences) * max(1, valid))
        return found

    return weights
