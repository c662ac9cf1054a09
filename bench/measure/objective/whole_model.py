"""Loss and gradients of a step of the cell's whole model on one rank, layer by layer, exact and rounded.

All computations of the step run through one layer before the next layer gets its parameters. Memory therefore
holds one layer and the inputs of all layers, whatever the size of the model.
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
from bench.training.weights import WeightFiller, model_weights

EXACT = "exact"
MISTAKEN = "mistaken"
CONTROLS = {f"control {parts}": parts for parts in (1, 2, 3)}
"""Computations that are equal in exact arithmetic, with the number of parts in which they sum over the
keys."""

Gradients = dict[str, Tensor]
"""Gradients, or parameters, by the names that parameters have in engines."""
Weights = Callable[[Batch], Tensor]
"""Function that returns the weight of each token's loss, [B, T]."""


@dataclass(frozen=True, slots=True)
class Computation:
    """One way to compute the step, such as exactly or rounded."""

    dtype: torch.dtype
    """Dtype of the weights."""
    autocast: torch.dtype | None
    """Dtype to which autocast rounds; None without autocast."""
    weights: Weights
    """Weights of the tokens' losses."""
    key_parts: int = 1
    """Number of parts in which attention sums over the keys."""


@dataclass(slots=True)
class _Sequence:
    """State of one sequence in one computation."""

    batch: Batch
    keywords: list[dict[str, Any]] = field(default_factory=list)
    """Arguments that the model passes to each layer, such as rotary cos and sin."""
    states: list[Tensor] = field(default_factory=list)
    """Input of each layer and output of the last, [B, T, H]. A layer's backward removes its input."""
    gradient: Tensor | None = None
    """Gradient of the input of the layer whose backward ran last."""


class WholeModel:
    """The model before any step, on this rank alone, with the sequences of the first step."""

    def __init__(
        self, trainer: Trainer, tokens: int, device: torch.device, attention: PlainAttention
    ) -> None:
        cell = trainer.cell
        self.cell, self.device, self.attention = cell, device, attention
        self.phase = trainer.phase
        self.sequences = trainer.data.whole_step(0, tokens)
        model = empty_model(cell.model, attention_name=PLAIN_NAME, max_positions=cell.seq_len).train()
        self.layers: list[nn.Module] = list(model.model.layers)
        self.filling = WeightFiller(model, model_weights(cell.model, cell.seed), device)
        self.filling.fill_ends()
        if device.type == "cpu":  # the cell's model does so, too
            sum_embedding_gradient_in_float32(model)
        self.named = _NamedModel(model)
        self.ends = {
            name: parameter.detach()
            for name, parameter in self.named.named_parameters()
            if not parameter.is_meta
        }
        self.computations = {EXACT: Computation(torch.float64, None, _mean_over_tokens(self.sequences))}
        for name, parts in CONTROLS.items():
            self.computations[name] = self._rounded_computation(parts, self.computations[EXACT].weights)
        # Other dtypes have too little noise to hide the mistake.
        if cell.sp_degree > 1 and cell.dtype in LOW_PRECISION:
            weights = mean_of_ranks(trainer.strategy, self.sequences)
            self.computations[MISTAKEN] = self._rounded_computation(1, weights)
        self.losses: dict[str, StepLoss] = {}
        """Loss of each computation, set before `gradients` yields for the first time."""

    def gradients(self, coverage: Coverage) -> Iterator[tuple[str, Gradients]]:
        """Yield each computation's name and its gradients of one layer, the exact computation first.

        The last layer comes first, and the parameters outside of layers last. Gradients are sums over the
        sequences, in float32 or float64. Layers without compared parameters are left out.
        """
        running = {name: [_Sequence(batch) for batch in self.sequences] for name in self.computations}
        self._run_forward(running)
        for index in reversed(range(len(self.layers))):
            parameters = self._layer_parameters(index)
            is_wanted = any(name in coverage for name in parameters)
            for name, sequences in running.items():
                gradients = self._layer_backward(
                    index, parameters, self.computations[name], sequences, is_wanted=is_wanted
                )
                if is_wanted:
                    yield name, gradients
        if coverage.has_ends:
            for name, sequences in running.items():
                yield name, self._ends_gradients(self.computations[name], sequences)
        self.phase.enter(None)

    def _rounded_computation(self, key_parts: int, weights: Weights) -> Computation:
        """Return a computation in the cell's dtype, with weights of that dtype or with autocast."""
        dtype = TORCH_DTYPES[self.cell.dtype]
        if is_autocast(self.cell):
            return Computation(torch.float32, dtype, weights, key_parts)
        return Computation(dtype, None, weights, key_parts)

    def _run_forward(self, running: Mapping[str, list[_Sequence]]) -> None:
        """Run all computations forward; set states, keywords, losses and the last output's gradient."""
        self.phase.enter("forward")
        with torch.no_grad():
            for name, sequences in running.items():
                ends = _cast(self.ends, self.computations[name].dtype)
                for sequence in sequences:
                    with self._computing(self.computations[name], sequence.batch):
                        sequence.states.append(self._embed(ends, sequence.batch))
                        sequence.keywords = _layer_keywords(
                            self.named.model.model, sequence.states[0], sequence.batch.position_ids
                        )
            for index in range(len(self.layers)):
                # Report progress: a large model takes minutes on a CPU, and the rank must not count as hung.
                self.phase.enter("forward")
                parameters = self._layer_parameters(index)
                for name, sequences in running.items():
                    weights = _cast(parameters, self.computations[name].dtype)
                    for sequence in sequences:
                        with self._computing(self.computations[name], sequence.batch):
                            out = self._run_layer(index, weights, sequence, sequence.states[index])
                            sequence.states.append(out)
        self.phase.enter("loss")
        for name, sequences in running.items():
            self.losses[name] = self._loss(self.computations[name], sequences)

    def _loss(self, computation: Computation, sequences: Sequence[_Sequence]) -> StepLoss:
        """Return the loss, and set the gradient of the last layer's output in each sequence."""
        ends, blocks = _cast(self.ends, computation.dtype), []
        for sequence in sequences:
            state = sequence.states[-1].detach().requires_grad_()
            with self._computing(computation, sequence.batch):
                losses = self._weighted_losses(ends, computation, sequence.batch, state)
                (sequence.gradient,) = torch.autograd.grad(losses.sum(), state)
            blocks += [block.detach().sum(dim=1) for block in losses.split(LOSS_BLOCK, dim=1)]
        sums = torch.cat(blocks).double()
        return StepLoss(float(sums.sum()), sums)

    def _layer_backward(
        self,
        index: int,
        parameters: Gradients,
        computation: Computation,
        sequences: Sequence[_Sequence],
        *,
        is_wanted: bool,
    ) -> Gradients:
        """Run one layer's backward and set each sequence's `gradient` to that of the layer's input.

        Return the gradients of the layer's parameters if they are wanted.
        """
        self.phase.enter("backward")
        weights = _cast(parameters, computation.dtype, requires_grad=is_wanted)
        wanted, sums = weights if is_wanted else {}, Gradients()
        for sequence in sequences:
            state = sequence.states.pop(index).detach().requires_grad_()
            with self._computing(computation, sequence.batch):
                out = self._run_layer(index, weights, sequence, state)
                sequence.gradient, *gradients = torch.autograd.grad(
                    out, [state, *wanted.values()], sequence.gradient
                )
            _add(sums, wanted, gradients)
        return sums

    def _ends_gradients(self, computation: Computation, sequences: Sequence[_Sequence]) -> Gradients:
        """Return the gradients of embedding, final norm and head; those of tied weights are summed."""
        self.phase.enter("backward")
        ends, sums = _cast(self.ends, computation.dtype, requires_grad=True), Gradients()
        for sequence in sequences:
            with self._computing(computation, sequence.batch):
                losses = self._weighted_losses(ends, computation, sequence.batch, sequence.states[-1])
                outputs = [losses.sum(), self._embed(ends, sequence.batch)]
                gradients = torch.autograd.grad(outputs, [*ends.values()], [None, sequence.gradient])
            _add(sums, ends, gradients)
        return sums

    def _layer_parameters(self, index: int) -> Gradients:
        """Return the initial parameters of a layer by name; the model's own layer stays empty."""
        prefix = f"model.model.layers.{index}."
        parameters = self.filling.take(self.layers[index])
        return {prefix + name: parameter for name, parameter in parameters.items()}

    def _run_layer(self, index: int, weights: Gradients, sequence: _Sequence, state: Tensor) -> Tensor:
        out: Tensor = self._call(weights, lambda _: self.layers[index](state, **sequence.keywords[index]))
        return out

    def _embed(self, ends: Gradients, batch: Batch) -> Tensor:
        out: Tensor = self._call(ends, lambda model: model.get_input_embeddings()(batch.input_ids))
        return out

    def _weighted_losses(
        self, ends: Gradients, computation: Computation, batch: Batch, state: Tensor
    ) -> Tensor:
        """Return each token's contribution to the loss, [B, T], in float64; 0 for an ignored label."""
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
        """Set attention's summation order and documents, and autocast, within the context."""
        self.attention.documents, self.attention.key_parts = batch.documents, computation.key_parts
        narrow = computation.autocast
        with torch.autocast(self.device.type, narrow, enabled=narrow is not None, cache_enabled=False):
            yield


class _NamedModel(nn.Module):
    """A model with the parameter names of engines, whose forward calls a function on the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[PreTrainedModel], Any]) -> Any:
        return compute(self.model)


class _Recorder(nn.Module):
    """A layer that returns its input and keeps the arguments that the model passes to it."""

    def forward(self, state: Tensor, **keywords: Any) -> Tensor:
        self.keywords = keywords
        return state


def _layer_keywords(model: Any, embedded: Tensor, position_ids: Tensor) -> list[dict[str, Any]]:
    """Return the keyword arguments that the model's own forward passes to each of its layers."""
    layers, recorders = model.layers, [_Recorder() for _ in model.layers]
    model.layers = nn.ModuleList(recorders)
    try:
        model(inputs_embeds=embedded, position_ids=position_ids, use_cache=False)
    finally:
        model.layers = layers
    return [recorder.keywords for recorder in recorders]


def _cast(parameters: Gradients, dtype: torch.dtype, *, requires_grad: bool = False) -> Gradients:
    return {
        name: parameter.detach().to(dtype).requires_grad_(requires_grad)
        for name, parameter in parameters.items()
    }


def _add(sums: Gradients, names: Iterable[str], gradients: Iterable[Tensor]) -> None:
    """Add one sequence's gradients to `sums`, in float32 or float64."""
    for name, gradient in zip(names, gradients, strict=True):
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums[name] = sums[name] + wide if name in sums else wide


def _mean_over_tokens(sequences: Sequence[Batch]) -> Weights:
    """Return the weights of the objective, in which every valid token of the step counts the same."""
    valid = max(1, sum(int(count_valid(batch.labels)) for batch in sequences))
    return lambda batch: torch.full_like(batch.labels, 1 / valid, dtype=torch.float64)


def mean_of_ranks(strategy: Strategy, sequences: Sequence[Batch]) -> Weights:
    """Return the weights of a known mistake: the mean over ranks of their means over their valid tokens."""

    def weights(batch: Batch) -> Tensor:
        token_weights = torch.zeros(batch.labels.shape, dtype=torch.float64, device=batch.labels.device)
        for rank in range(strategy.cell.sp_degree):
            pieces = strategy.facts.slices(strategy.cell, batch.labels.shape[1], rank)
            valid = sum(int(count_valid(batch.labels[:, piece])) for piece in pieces)
            for piece in pieces:
                token_weights[:, piece] = 1 / (strategy.cell.sp_degree * len(sequences) * max(1, valid))
        return token_weights

    return weights
