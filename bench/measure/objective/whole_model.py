"""Loss and gradients of a step of the cell's whole model on one rank, layer by layer, exact and rounded.

All computations of the step run through one layer before the next layer gets its parameters. Memory therefore
holds the inputs of all layers, but the parameters of only one layer and of the ends of the model: embedding,
final norm and output head.

Shapes: B sequences, T tokens of a sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bench.config import LOW_PRECISION
from bench.measure.objective.coverage import Coverage
from bench.measure.objective.gradient_noise import LOSS_BLOCK, StepLoss
from bench.measure.parity.exact import PLAIN_NAME, AttentionRounding, PlainAttention
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy
from bench.training.data import count_valid
from bench.training.engines import is_autocast
from bench.training.models import TORCH_DTYPES, empty_model, sum_embedding_gradient_in_float32
from bench.training.trainers.trainer import Trainer
from bench.training.weights import WeightFiller, model_weights

EXACT = "exact"
"""Name of the computation in float64."""
MISTAKEN = "mistaken"
"""Name of the computation with a known mistake: losses averaged over ranks."""
CONTROLS = {
    "control 1": AttentionRounding(),
    "control 2": AttentionRounding(key_parts=2, rounds_scores=True),
    "control 3": AttentionRounding(key_parts=3, rounds_scores=True),
}
"""Rounding of attention in the controls, by name. The controls are correct computations in the cell's dtype,
so their distance from float64 is that of rounding. Controls that differed only in the sum over the keys would
have almost equal errors, all of which may be small by chance."""

NamedTensors = dict[str, Tensor]
"""Parameters or gradients by the names that the parameters have in engines."""
Weights = Callable[[Batch], Tensor]
"""Function that returns the weight of each token's loss, [B, T]."""


@dataclass(frozen=True, slots=True)
class Computation:
    """One way to compute the step: in float64, rounded, or with a known mistake."""

    dtype: torch.dtype
    """Dtype of the parameters."""
    autocast: torch.dtype | None
    """Dtype to which autocast rounds; None without autocast."""
    weights: Weights
    """Weights of the tokens' losses in the loss of the step."""
    rounding: AttentionRounding
    """Rounding of attention."""


@dataclass(slots=True)
class _Sequence:
    """State of one sequence in one computation."""

    batch: Batch
    keywords: list[dict[str, Any]] = field(default_factory=list)
    """Arguments that the model passes to each layer, such as rotary cos and sin."""
    states: list[Tensor] = field(default_factory=list)
    """Input of each layer and output of the last, [B, T, H]. A layer's backward removes its input."""
    gradient: Tensor | None = None
    """Gradient of the loss with respect to the input of the layer whose backward ran last."""


class WholeModel:
    """The model before any step, on this rank alone, with all sequences of the first step."""

    def __init__(
        self, trainer: Trainer, tokens: int, device: torch.device, attention: PlainAttention
    ) -> None:
        cell = trainer.cell
        self.cell, self.device, self.attention = cell, device, attention
        self.phase = trainer.phase
        self.sequences = trainer.data.whole_step(0, tokens)
        model = empty_model(cell.model, attention_name=PLAIN_NAME, max_positions=cell.seq_len).train()
        self.layers: list[nn.Module] = list(model.model.layers)
        self.filler = WeightFiller(model, model_weights(cell.model, cell.seed), device)
        self.filler.fill_ends()
        if device.type == "cpu":  # as in the cell's model
            sum_embedding_gradient_in_float32(model)
        self.named_model = _NamedModel(model)
        self.ends = {
            name: parameter.detach()
            for name, parameter in self.named_model.named_parameters()
            if not parameter.is_meta
        }
        right = _mean_over_tokens(self.sequences)
        self.computations = {EXACT: Computation(torch.float64, None, right, AttentionRounding())}
        for name, rounding in CONTROLS.items():
            self.computations[name] = self._rounded_computation(rounding, right)
        # Only the noise of 16-bit dtypes is large enough to hide the mistake.
        if cell.sp_degree > 1 and cell.dtype in LOW_PRECISION:
            weights = mean_of_ranks(trainer.strategy, self.sequences)
            self.computations[MISTAKEN] = self._rounded_computation(AttentionRounding(), weights)
        self.losses: dict[str, StepLoss] = {}
        """Loss of each computation, set before `gradients` yields for the first time."""

    def gradients(self, coverage: Coverage) -> Iterator[tuple[str, NamedTensors]]:
        """Yield the name of each computation with its gradients of one layer, the exact computation first.

        The last layer comes first, and the parameters outside of layers come last. Gradients are summed over
        the sequences, in float32 or float64. Layers without compared parameters are left out.
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

    def loss_across_documents(self) -> StepLoss:
        """Return the loss in float64 of attention that ignores the ends of packed documents."""
        sequences = [_Sequence(replace(batch, documents=None)) for batch in self.sequences]
        self._run_forward({EXACT: sequences})
        self.phase.enter(None)
        return self.losses[EXACT]

    def _rounded_computation(self, rounding: AttentionRounding, weights: Weights) -> Computation:
        """Return a computation in the cell's dtype, with weights of that dtype or with autocast."""
        dtype = TORCH_DTYPES[self.cell.dtype]
        if is_autocast(self.cell):
            return Computation(torch.float32, dtype, weights, rounding)
        return Computation(dtype, None, weights, rounding)

    def _run_forward(self, running: Mapping[str, list[_Sequence]]) -> None:
        """Run all computations forward and fill the state of every sequence, and `losses`."""
        self.phase.enter("forward")
        with torch.no_grad():
            for name, sequences in running.items():
                ends = _cast(self.ends, self.computations[name].dtype)
                for sequence in sequences:
                    with self._computing(self.computations[name], sequence.batch):
                        sequence.states.append(self._embed(ends, sequence.batch))
                        sequence.keywords = _layer_keywords(
                            self.named_model.model.model, sequence.states[0], sequence.batch.position_ids
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
        parameters: NamedTensors,
        computation: Computation,
        sequences: Sequence[_Sequence],
        *,
        is_wanted: bool,
    ) -> NamedTensors:
        """Run one layer's backward and set each sequence's `gradient` to the gradient of the layer's input.

        Return the gradients of the layer's parameters, or an empty dictionary if they are not wanted.
        """
        self.phase.enter("backward")
        weights = _cast(parameters, computation.dtype, requires_grad=is_wanted)
        wanted, sums = weights if is_wanted else {}, NamedTensors()
        for sequence in sequences:
            state = sequence.states.pop(index).detach().requires_grad_()
            with self._computing(computation, sequence.batch):
                out = self._run_layer(index, weights, sequence, state)
                sequence.gradient, *gradients = torch.autograd.grad(
                    out, [state, *wanted.values()], sequence.gradient
                )
            _add(sums, wanted, gradients)
        return sums

    def _ends_gradients(self, computation: Computation, sequences: Sequence[_Sequence]) -> NamedTensors:
        """Return the gradients of embedding, final norm and head; those of tied weights are summed."""
        self.phase.enter("backward")
        ends, sums = _cast(self.ends, computation.dtype, requires_grad=True), NamedTensors()
        for sequence in sequences:
            with self._computing(computation, sequence.batch):
                losses = self._weighted_losses(ends, computation, sequence.batch, sequence.states[-1])
                outputs = [losses.sum(), self._embed(ends, sequence.batch)]
                gradients = torch.autograd.grad(outputs, [*ends.values()], [None, sequence.gradient])
            _add(sums, ends, gradients)
        return sums

    def _layer_parameters(self, index: int) -> NamedTensors:
        """Return the initial parameters of a layer by name; the layer itself stays without parameters."""
        prefix = f"model.model.layers.{index}."
        parameters = self.filler.take(self.layers[index])
        return {prefix + name: parameter for name, parameter in parameters.items()}

    def _run_layer(self, index: int, weights: NamedTensors, sequence: _Sequence, state: Tensor) -> Tensor:
        out: Tensor = self._call(weights, lambda _: self.layers[index](state, **sequence.keywords[index]))
        return out

    def _embed(self, ends: NamedTensors, batch: Batch) -> Tensor:
        out: Tensor = self._call(ends, lambda model: model.get_input_embeddings()(batch.input_ids))
        return out

    def _weighted_losses(
        self, ends: NamedTensors, computation: Computation, batch: Batch, state: Tensor
    ) -> Tensor:
        """Return each token's contribution to the loss, [B, T], in float64; 0 for an ignored label."""
        logits = self._call(ends, lambda model: model.lm_head(model.model.norm(state)))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        )
        return losses.view_as(batch.labels) * computation.weights(batch)

    def _call(self, weights: NamedTensors, compute: Callable[[Any], Any]) -> Any:
        return functional_call(self.named_model, weights, (compute,))

    @contextmanager
    def _computing(self, computation: Computation, batch: Batch) -> Iterator[None]:
        """Set the rounding and documents of attention, and autocast, within the context."""
        self.attention.documents, self.attention.rounding = batch.documents, computation.rounding
        dtype = computation.autocast
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            yield


class _NamedModel(nn.Module):
    """Wrapper with the parameter names of engines, whose forward calls a function on the model."""

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


def _cast(parameters: NamedTensors, dtype: torch.dtype, *, requires_grad: bool = False) -> NamedTensors:
    return {
        name: parameter.detach().to(dtype).requires_grad_(requires_grad)
        for name, parameter in parameters.items()
    }


def _add(sums: NamedTensors, names: Iterable[str], gradients: Iterable[Tensor]) -> None:
    """Add one sequence's gradients to `sums`, in at least float32."""
    for name, gradient in zip(names, gradients, strict=True):
        summand = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums[name] = sums[name] + summand if name in sums else summand


def _mean_over_tokens(sequences: Sequence[Batch]) -> Weights:
    """Return the right weights of the loss, in which every valid token of the step counts the same."""
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
