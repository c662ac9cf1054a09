"""Labels and loss weights of the tokens that a loop trains, derived from the gradient of the logits.

For a cross-entropy l_i with weight w_i, the gradient of the logits is w_i * (softmax_i - onehot(label_i)).
Its only negative entry is at the label, and its positive entries sum to w_i * (1 - p_i), with p_i the
probability of the label. Weights and labels that are found in this way are the ones that the loop trains,
even if it states another loss. If hidden states were gathered before the head, the logits of this rank's
tokens are read, and the weights are those that the layers get.

Letters of shapes: B sequences, T tokens of the shard, V entries of the vocabulary, R = B * T rows of logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.common.deferred_errors import DeferredErrors
from bench.extras.observe.gathered_states import Gather, GatheredStates
from bench.extras.observe.objective import UNTRAINED, MicroStep
from bench.extras.observe.places import EQUAL_ROWS
from bench.extras.observe.tokens import ModelInputWatch, combine_rows, cut_to_shard, tensor_arguments
from bench.measure.hooks import Hook
from bench.strategies.strategy import IGNORED_LABEL

SMALLEST_LOSS = 1e-6
"""Loss of a token in nats, up to which the gradient of its logits may be rounded to 0."""
CHUNK_LOGITS = 2**24
"""Number of logits that are converted to float32 at a time."""


@dataclass(frozen=True, slots=True)
class StatedLoss:
    """Arguments of one call of `Observation.loss`."""

    step: int
    loss: Tensor | float | None
    valid_tokens: Tensor | float | None
    """Number of this rank's tokens in the loss."""


@dataclass(slots=True)
class _ModelCall:
    """One call of the model: its tokens, and what its backward needs of the logits."""

    ids: Tensor
    """Token ids, [B, T]."""
    positions: Tensor
    """Positions in the sequence, [B, T]."""
    valid_tokens: Tensor | None
    """Number of labels that count, of those that the model was given; None if it was given none."""
    lse: Tensor
    """Log-sum-exp of the logits in float32, [R]."""
    successors: Tensor
    """Next token of each token, [R]; UNTRAINED if this rank does not hold it."""
    successor_logits: Tensor
    """Logit of the successor, [R]."""
    open_rows: Tensor
    """Indices of the rows whose successor this rank does not hold."""
    open_logits: Tensor
    """Copy of the logits of `open_rows`, kept until backward."""
    gather: Gather | None
    """Gather of hidden states before the head; None if the logits are those of the shard."""
    micro_step: MicroStep | None = None
    """Result of the first backward."""
    backwards: int = 0
    """Number of gradients that the logits received; if it is not 1, none is the whole gradient."""


class TrainedTokens:
    """Watches the logits of one step, and stores the losses that the loop states in all steps.

    Until backward, a watched call keeps some numbers per token and the logits of each shard's last token.
    """

    def __init__(self, network: nn.Module, input_watch: ModelInputWatch) -> None:
        self.network = network
        self.input_watch = input_watch
        self.stated: list[StatedLoss] = []
        """Losses stated in all steps."""
        self.stated_in_step: Sequence[StatedLoss] = ()
        """Losses stated in the watched step."""
        self._gathered = GatheredStates(network, len(input_watch.group))
        self._calls: list[_ModelCall] = []
        self._errors = DeferredErrors()

    def state(self, step: int, loss: Tensor | float | None, valid_tokens: Tensor | float | None) -> None:
        """Store copies of the loss and of the number of valid tokens that the loop states in a step."""
        with self._errors:
            self.stated.append(StatedLoss(step, _copy(loss), _copy(valid_tokens)))

    def stated_not_finite(self) -> tuple[int, str] | None:
        """Return the first step in which this rank stated a number that is not finite, and a message."""
        for stated in self.stated:
            numbers = {"loss": stated.loss, "number of valid tokens": stated.valid_tokens}
            for name, number in numbers.items():
                value = 0.0 if number is None else float(torch.as_tensor(number).sum())
                if not math.isfinite(value):
                    rank = dist.get_rank()
                    return stated.step, f"the stated {name} of step {stated.step} on rank {rank} is {value}"
        return None

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Watch one step; does nothing if the loop has stated no loss in any earlier step."""
        earlier, tokens = len(self.stated), self.input_watch.tokens
        if earlier == 0 or tokens is None:
            yield
            return
        self._calls = []
        hook = self.network.register_forward_hook(Hook(self._record_call), with_kwargs=True)
        try:
            with self._gathered.watch_step(tokens.length):
                yield
        finally:
            self.stated_in_step = self.stated[earlier:]
            hook.remove()
        self._errors.raise_first()

    def micro_steps(self, all_gather_objects: Callable[[Any], list[Any]]) -> list[MicroStep]:
        """Return the trained tokens of every watched call with exactly one backward, and drop the calls.

        Every rank must call this method. `all_gather_objects` returns the objects of all ranks that share a
        sequence.
        """
        calls, self._calls = [call for call in self._calls if call.backwards == 1], []
        wholes = all_gather_objects([None if call.gather is None else call.gather.whole for call in calls])
        micro_steps = []
        for number, call in enumerate(calls):
            step = call.micro_step
            of_ranks = [of_rank[number] for of_rank in wholes]
            factors = None if call.gather is None else call.gather.layer_factors(of_ranks)
            if step is not None and factors is not None:
                weighted_doubt = step.weighted_doubt * factors[0]
                step = replace(step, weighted_doubt=weighted_doubt, layer_share=factors[1])
            if step is not None and (call.gather is None or factors is not None):
                micro_steps.append(step)
        return micro_steps

    def _record_call(
        self, network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> None:
        with self._errors, torch.no_grad():
            arguments, logits = tensor_arguments(network, args, named), getattr(output, "logits", None)
            if not isinstance(logits, Tensor) or not logits.requires_grad or "input_ids" not in arguments:
                return
            index = self.input_watch.shard_index
            if index is not None and arguments["input_ids"].shape[1] > len(index):
                arguments = cut_to_shard(arguments, index)
            gather = self._gathered.take()
            shard = logits.detach() if gather is None else logits.detach()[:, gather.index]
            if shard.shape[:2] == arguments["input_ids"].shape:
                call = _before_backward(shard, arguments, gather)
                self._calls.append(call)
                logits.register_hook(self._gradient_hook(call))

    def _gradient_hook(self, call: _ModelCall) -> Callable[[Tensor], None]:
        errors = self._errors

        def read_gradient(gradient: Tensor) -> None:
            with errors, torch.no_grad():
                call.backwards += 1
                if call.backwards > 1:
                    return
                shard = gradient.detach() if call.gather is None else gradient.detach()[:, call.gather.index]
                call.micro_step = _after_backward(call, shard.flatten(0, 1))
                call.open_logits = call.lse = call.successor_logits = torch.empty(0)

        return read_gradient


def _copy(number: Tensor | float | None) -> Tensor | float | None:
    return number.detach().clone() if isinstance(number, Tensor) else number


def _before_backward(
    logits_BTV: Tensor, arguments: Mapping[str, Tensor], gather: Gather | None
) -> _ModelCall:
    """Return what backward needs of the logits. A successor is known if its position follows the token's."""
    ids = arguments["input_ids"].clone()  # `context_parallel` restores the whole tensor before backward ends
    position_ids = arguments.get("position_ids", torch.arange(ids.shape[1], device=ids.device))
    positions = combine_rows(position_ids, len(ids)).clone()
    is_followed = torch.isin(positions.diff(), torch.tensor([1, EQUAL_ROWS], device=ids.device))
    unknown = torch.full_like(ids[:, :1], UNTRAINED)
    successors = torch.cat([ids[:, 1:].where(is_followed, unknown), unknown], dim=1).flatten()
    logits_RV = logits_BTV.flatten(0, 1)
    open_rows = (successors == UNTRAINED).nonzero().flatten()
    pairs = [
        (chunk.float().logsumexp(-1), chunk.float().gather(-1, next_.clamp(min=0)[:, None]).squeeze(-1))
        for chunk, next_ in zip(_chunks(logits_RV), successors.split(_chunk_rows(logits_RV)), strict=True)
    ]
    lse, successor_logits = (torch.cat(chunks) for chunks in zip(*pairs, strict=True))
    labels = arguments.get("shift_labels")
    if labels is None and "labels" in arguments:
        labels = arguments["labels"][:, 1:]  # the model shifts them
    return _ModelCall(
        ids=ids,
        positions=positions,
        valid_tokens=None if labels is None else (labels != IGNORED_LABEL).sum(),
        lse=lse,
        successors=successors,
        successor_logits=successor_logits,
        open_rows=open_rows,
        open_logits=logits_RV[open_rows].clone(),
        gather=gather,
    )


def _after_backward(call: _ModelCall, gradient_RV: Tensor) -> MicroStep:
    """Derive labels, weights and losses from the gradient of the logits, as the module's docstring says.

    The label of a row with an unknown successor counts as the next token.
    """
    pairs = [(chunk.float().clamp(min=0).sum(-1), chunk.min(-1)) for chunk in _chunks(gradient_RV)]
    negative = sum(float(chunk.float().clamp(max=0).sum()) for chunk in _chunks(gradient_RV))
    at_labels = sum(float(minimum.values.float().clamp(max=0).sum()) for _, minimum in pairs)
    weighted_doubt = torch.cat([positive for positive, _ in pairs])
    labels = torch.cat([minimum.indices.where(minimum.values < 0, UNTRAINED) for _, minimum in pairs])
    labels[weighted_doubt.isnan()] = 0  # the token is trained, but its gradient is nan
    label_logits, successors = call.successor_logits.clone(), call.successors.clone()
    open_labels = labels[call.open_rows]
    open_logits = call.open_logits.float().gather(-1, open_labels.clamp(min=0)[:, None])
    label_logits[call.open_rows] = open_logits.squeeze(-1)
    successors[call.open_rows] = open_labels
    is_next = (labels == successors) & (labels != UNTRAINED)
    loss = (call.lse - label_logits)[is_next].double()
    is_finite = bool(weighted_doubt.isfinite().all())
    return MicroStep(
        ids=_to_numpy(call.ids),
        positions=_to_numpy(call.positions),
        labels=_to_numpy(labels.view_as(call.ids)),
        weighted_doubt=float(weighted_doubt[is_next].double().sum()) if is_finite else math.nan,
        doubt=float(-(-loss).expm1().sum()),
        loss_sum=float(loss.sum()),
        next_tokens=int(is_next.sum()),
        other_targets=1 - at_labels / negative if negative < 0 else 0.0,
        valid_tokens=_counted_tokens(call, labels) if call.valid_tokens is None else int(call.valid_tokens),
    )


def _counted_tokens(call: _ModelCall, labels: Tensor) -> int | None:
    """Return the number of tokens with a gradient; None if one without might be trained, as its loss is 0."""
    is_trained = labels != UNTRAINED
    has_no_loss = (call.lse - call.successor_logits <= SMALLEST_LOSS) & (call.successors != UNTRAINED)
    return None if bool((has_no_loss & ~is_trained).any()) else int(is_trained.sum())


def _chunk_rows(logits_RV: Tensor) -> int:
    return max(1, CHUNK_LOGITS // logits_RV.shape[1])


def _chunks(logits_RV: Tensor) -> tuple[Tensor, ...]:
    chunks: tuple[Tensor, ...] = logits_RV.split(_chunk_rows(logits_RV))
    return chunks


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return np.array(tensor.cpu().numpy())
