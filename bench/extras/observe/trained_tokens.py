"""Labels and loss weights of the tokens that a loop trains, derived from the gradient of the logits.

For a cross-entropy with weight w_i the gradient of the logits is w_i * (softmax_i - onehot(label_i)). Its
only negative entry is at the label: -w_i * (1 - p_i), with p_i the probability of the label. In some random
columns j it must be w_i * softmax_ij, which shows other losses, such as label smoothing or scaled logits.

Letters of shapes: B sequences, T tokens of the shard, V entries of the vocabulary, R = B * T rows of logits,
K sampled columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from bench.common.deferred_errors import DeferredErrors
from bench.extras.observe.objective import UNTRAINED, MicroStep
from bench.extras.observe.tokens import IDS, sequence_positions, tensor_arguments
from bench.measure.hooks import Hook
from bench.strategies.strategy import IGNORED_LABEL

SMALLEST_DOUBT = 0.01
"""Value of 1 - p_i from which rounding of the logits hardly changes a weight."""
OTHER_TARGETS = 0.01
"""Largest share of the negative gradient that rounding of a cross-entropy may leave to other tokens."""
COLUMNS = 8
"""Number of columns in which gradients are compared with the softmax."""
MAX_SLOPE_NOISE = 0.01
"""Largest standard error of the slope at which other losses are recognised."""
SMALLEST_SPREAD = 1e-3
"""Smallest standard deviation of logits that shows their slope."""
CHUNK_LOGITS = 2**24
"""Number of logits that are converted to float32 at a time."""


class TrainedTokens:
    """Watches the logits of one step, and what the loop states of its loss.

    Attributes:
        stated: Whether a value was stated, and the number of valid tokens, by call of `Observation.loss`.
        reason: Reason why a call of the watched step shows no trained tokens; None if all do.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self.network = network
        self.vocabulary = network.config.get_text_config().vocab_size
        self.stated: list[tuple[bool, Tensor | float | None]] = []
        self.reason: str | None = None
        self._calls: list[list[MicroStep]] = []
        self._errors = DeferredErrors()

    def state(self, loss: Tensor | float | None, valid_tokens: Tensor | float | None) -> None:
        with self._errors:
            count = valid_tokens.detach().clone() if isinstance(valid_tokens, Tensor) else valid_tokens
            self.stated.append((loss is not None, count))

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        self._calls, self.stated, self.reason = [], [], None
        with self.network.register_forward_hook(Hook(self._record_call), with_kwargs=True):
            yield
        self._errors.raise_first()

    def micro_steps(self) -> list[MicroStep]:
        """Return and drop the trained tokens of all calls; set `reason` if a call has several gradients."""
        calls, self._calls = self._calls, []
        if any(len(gradients) > 1 for gradients in calls):
            self.reason = "the logits received several gradients"
        return [gradients[0] for gradients in calls if gradients]

    def _record_call(
        self, network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> None:
        with self._errors, torch.no_grad():
            outputs = (getattr(output, name, None) for name in ("logits", "loss"))
            if not any(isinstance(x, Tensor) and x.requires_grad for x in outputs):
                return  # evaluation
            arguments, logits = tensor_arguments(network, args, named), getattr(output, "logits", None)
            if IDS not in arguments:
                self.reason = "the model was given embeddings and no ids, so the next tokens are not known"
                return
            shape = arguments[IDS].shape
            positions, reason = sequence_positions(
                arguments.get("position_ids", torch.arange(shape[1], device=arguments[IDS].device)), shape[0]
            )
            reason = _why_unreadable(logits, shape, self.vocabulary) or reason
            if reason is not None or positions is None or logits is None:
                self.reason = reason
                return
            gradients: list[MicroStep] = []
            self._calls.append(gradients)
            read, errors = _gradient_reader(logits.detach(), arguments, positions), self._errors

            def read_gradient(gradient: Tensor | None) -> None:
                with errors, torch.no_grad():
                    if gradient is not None:  # None if a copy of these logits is used
                        gradients.append(read(gradient.detach().flatten(0, 1)))

            logits.register_hook(read_gradient)


def _why_unreadable(logits: Any, shape: torch.Size, vocabulary: int) -> str | None:
    """Return why logits are not those of the given tokens; None if they are."""
    if not isinstance(logits, Tensor) or logits.dim() != 1 + len(shape):
        return "the model returned no logits of each token"
    if isinstance(logits, DTensor) or logits.shape[-1] < vocabulary:
        return "the model returned logits of a part of the vocabulary"
    if logits.shape[:2] != shape:
        return f"the model returned logits of {logits.shape[1]} tokens and was given {shape[1]}"
    return None


def _gradient_reader(
    logits_BTV: Tensor, arguments: Mapping[str, Tensor], positions_BT: Tensor
) -> Callable[[Tensor], MicroStep]:
    """Return a function of the gradient of the logits, [R, V], with a few numbers per token of the logits.

    A token's successor is known if its position follows the token's; else another rank may hold it, and the
    label counts as the next token.
    """
    ids = arguments[IDS].clone()  # `context_parallel` restores the whole tensor before backward ends
    positions = positions_BT.clone()
    unknown = torch.full_like(ids[:, :1], UNTRAINED)
    successors = torch.cat([ids[:, 1:].where(positions.diff() == 1, unknown), unknown], dim=1).flatten()
    logits_RV = logits_BTV.flatten(0, 1)
    lse = torch.cat([chunk.float().logsumexp(-1) for chunk in _chunks(logits_RV)])
    successor_logits = logits_RV.gather(-1, successors.clamp(min=0)[:, None]).squeeze(-1).float()
    open_rows = (successors == UNTRAINED).nonzero().flatten()
    open_logits = logits_RV[open_rows].float()
    generator = torch.Generator().manual_seed(0)  # the loop's random generators must not advance
    columns = torch.randperm(logits_RV.shape[1], generator=generator)[:COLUMNS].to(ids.device)
    column_logits = logits_RV[:, columns].float() - lse[:, None]
    given_labels = arguments.get("shift_labels", arguments.get("labels"))
    valid = None if given_labels is None else (given_labels != IGNORED_LABEL).sum(dim=0)

    def read(gradient_RV: Tensor) -> MicroStep:
        lowest = [chunk.min(-1) for chunk in _chunks(gradient_RV)]
        at_labels = torch.cat([minimum.values for minimum in lowest]).float()
        labels = torch.cat([minimum.indices for minimum in lowest]).where(at_labels < 0, UNTRAINED)
        negative = sum(float(chunk.float().clamp(max=0).sum()) for chunk in _chunks(gradient_RV))
        label_logits, nexts = successor_logits.clone(), successors.clone()
        nexts[open_rows] = open_labels = labels[open_rows]
        label_logits[open_rows] = open_logits.gather(-1, open_labels.clamp(min=0)[:, None]).squeeze(-1)
        doubt = -(label_logits.double() - lse).expm1()
        is_known = (labels != UNTRAINED) & (labels == nexts) & (doubt > SMALLEST_DOUBT)
        weights = (-at_labels / doubt).where(is_known, math.nan)
        error = _softmax_error(column_logits, gradient_RV[:, columns], weights, columns == labels[:, None])
        if float(at_labels.clamp(max=0).sum()) > (1 - OTHER_TARGETS) * negative:
            error = math.inf
        valid_tokens = None
        if valid is not None:  # the model may shift labels, or was given shifted ones
            sums, trained = [int(valid[first:].sum()) for first in (0, 1)], int((labels != UNTRAINED).sum())
            valid_tokens = min(sums, key=lambda count: abs(count - trained))
        return MicroStep(
            ids=ids.cpu().numpy(),
            positions=positions.cpu().numpy(),
            labels=labels.view_as(ids).cpu().numpy(),
            weights=weights.view_as(ids).cpu().numpy(),
            softmax_error=error,
            valid_tokens=valid_tokens,
        )

    return read


def _softmax_error(logs_RK: Tensor, gradient_RK: Tensor, weights: Tensor, is_label: Tensor) -> float:
    """Return how far gradients are from w_i * softmax_ij in the slope over the logits or in size.

    Both are differences of logarithms; the slope is 1 / temperature - 1 if logits are scaled. It is inf if
    the sampled columns do not show the slope, nan without a weight. `logs_RK` are logarithms of the softmax.
    """
    if not weights.isfinite().any():
        return math.nan
    smallest = torch.finfo(gradient_RK.dtype).tiny / 8  # up to here even fp16 rounds by less than 1 %
    gradient_RK = gradient_RK.float()
    is_known = weights.isfinite()[:, None] & ~is_label & (gradient_RK > smallest)
    log_weights = weights.clamp(min=smallest).log()[:, None]
    errors = (gradient_RK.clamp(min=smallest).log() - logs_RK - log_weights).where(is_known, 0.0)
    counts = is_known.sum(-1, keepdim=True).clamp(min=1)
    spread = (logs_RK - logs_RK.where(is_known, 0.0).sum(-1, keepdim=True) / counts).where(is_known, 0.0)
    squares = float(spread.double().square().sum())
    if squares <= SMALLEST_SPREAD**2 * int(is_known.sum()):
        return math.inf
    slope = float((spread * errors).double().sum()) / squares
    rest = errors - errors.sum(-1, keepdim=True) / counts - slope * spread
    noise = float(rest[is_known].std()) / math.sqrt(squares)
    return max(abs(slope), abs(float(errors[is_known].mean()))) if noise < MAX_SLOPE_NOISE else math.inf


def _chunks(logits_RV: Tensor) -> tuple[Tensor, ...]:
    chunks: tuple[Tensor, ...] = logits_RV.split(max(1, CHUNK_LOGITS // logits_RV.shape[1]))
    return chunks
