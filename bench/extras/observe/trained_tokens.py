"""What each token's loss weighs and which label it has, seen from the gradient of the logits.

Of a cross-entropy l_i with weight w_i the gradient of the logits is w_i * (softmax_i - onehot(label_i)): its
one negative entry stands at the label, and its positive ones add up to w_i * (1 - p_i), with p_i the label's
probability. So weights and labels are what the loop trains on, whatever it states and wherever it divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.common.kept_errors import KeptErrors
from bench.extras.observe.objective import UNTRAINED, MicroStep
from bench.extras.observe.tokens import tensors_given
from bench.measure.hooks import Hook
from bench.strategies.strategy import IGNORED_LABEL

CHUNK_NUMBERS = 2**24
"""Logits that are looked at at once, in float32."""


@dataclass(frozen=True, slots=True)
class StatedLoss:
    """What the loop says of one micro-step."""

    step: int
    loss: Tensor | float | None
    valid_tokens: Tensor | float | None
    """How many tokens are behind it, on this rank."""


@dataclass(slots=True)
class _Call:
    """One call of the model: its tokens, and what is known of their predictions before backward."""

    ids: Tensor
    positions: Tensor
    valid_tokens: Tensor | None
    """How many labels count, where the model was given any."""
    lse: Tensor
    """[B * T], of the logits in float32."""
    successors: Tensor
    """[B * T], the next token within this rank's shard; UNTRAINED where that is on another rank."""
    likely: Tensor
    """[B * T], the logit of that successor."""
    rows: Tensor
    """Rows without a successor here, whose logits are kept until backward."""
    kept: Tensor
    found: MicroStep | None = None
    backwards: int = 0
    """How often a gradient came: of several none is the step's whole."""


class TrainedTokens:
    """Watches the logits of one step, and hears what the loop says of each.

    Only small tensors are kept: of each token some numbers, of the last one of a shard its logits.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.stated: list[StatedLoss] = []
        """All that the loop says."""
        self.told: Sequence[StatedLoss] = ()
        """Of it what is of the step that was looked at."""
        self._calls: list[_Call] = []
        self._errors = KeptErrors()

    def tell(self, step: int, *numbers: Tensor | float | None) -> None:
        """The loop's own words: its loss, and the number of valid tokens. One step's are compared."""
        with self._errors:
            self.stated.append(
                StatedLoss(step, *(x.detach().clone() if isinstance(x, Tensor) else x for x in numbers))
            )

    def stated_not_finite(self) -> tuple[int, str] | None:
        """The first step in which this rank's loop stated what is not finite, and that in a line."""
        for told in self.stated:
            for what, number in (("loss", told.loss), ("number of valid tokens", told.valid_tokens)):
                value = 0.0 if number is None else float(torch.as_tensor(number).sum())
                if not math.isfinite(value):
                    where = f"of step {told.step} on rank {dist.get_rank()}"
                    return told.step, f"the loop says that the {what} {where} is {value}"
        return None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around one step, looked at anew, if the loop has told anything in those before."""
        before = len(self.stated)
        if before == 0:
            yield
            return
        self._calls = []
        hook = self.network.register_forward_hook(Hook(self._see), with_kwargs=True)
        try:
            yield
        finally:
            self.told = self.stated[before:]
            hook.remove()
        self._errors.raise_first()

    def micro_steps(self) -> list[MicroStep]:
        """What was trained on, call by call; without those that no gradient came back to."""
        found = [call.found for call in self._calls if call.found is not None and call.backwards == 1]
        self._calls = []
        return found

    def _see(self, network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        with self._errors, torch.no_grad():
            given, logits = tensors_given(network, args, named), getattr(output, "logits", None)
            if not isinstance(logits, Tensor) or not logits.requires_grad or "input_ids" not in given:
                return
            if logits.shape[:2] == given["input_ids"].shape:
                call = _before_backward(logits.detach(), given)
                self._calls.append(call)
                logits.register_hook(self._told_by_gradient(call))

    def _told_by_gradient(self, call: _Call) -> Callable[[Tensor], None]:
        errors = self._errors

        def look(gradient: Tensor) -> None:
            with errors, torch.no_grad():
                call.backwards += 1
                if call.backwards > 1:
                    return
                call.found = _after_backward(call, gradient.detach().flatten(0, 1))
                call.kept = call.lse = call.likely = torch.empty(0)

        return look


def _before_backward(logits_BTV: Tensor, given: Mapping[str, Tensor]) -> _Call:
    ids = given["input_ids"].clone()  # which `context_parallel` makes whole again before backward ends
    places = given.get("position_ids", torch.arange(ids.shape[1], device=ids.device))
    positions = places.clone().reshape(-1, ids.shape[1])[: len(ids)].expand_as(ids)
    follows = positions[:, 1:] == positions[:, :-1] + 1
    unknown = torch.full_like(ids[:, :1], UNTRAINED)
    successors = torch.cat([ids[:, 1:].where(follows, unknown), unknown], dim=1).flatten()
    logits_RV = logits_BTV.flatten(0, 1)
    rows = (successors == UNTRAINED).nonzero().flatten()
    pairs = [
        (part.float().logsumexp(-1), part.float().gather(-1, next_.clamp(min=0)[:, None]).squeeze(-1))
        for part, next_ in zip(_chunks(logits_RV), successors.split(_rows(logits_RV)), strict=True)
    ]
    lse, likely = (torch.cat(each) for each in zip(*pairs, strict=True))
    labels = given.get("shift_labels")
    if labels is None and "labels" in given:
        labels = given["labels"][:, 1:]  # the model shifts them
    valid = None if labels is None else (labels != IGNORED_LABEL).sum()
    return _Call(ids, positions, valid, lse, successors, likely, rows, logits_RV[rows].clone())


def _after_backward(call: _Call, gradient_RV: Tensor) -> MicroStep:
    pairs = [(part.float().clamp(min=0).sum(-1), part.min(-1)) for part in _chunks(gradient_RV)]
    pull = torch.cat([positive for positive, _ in pairs])
    labels = torch.cat([least.indices.where(least.values < 0, UNTRAINED) for _, least in pairs])
    labels[pull.isnan()] = 0  # trained, on something that is no number
    likely, known = call.likely.clone(), call.successors.clone()
    own_labels = labels[call.rows]
    likely[call.rows] = call.kept.float().gather(-1, own_labels.clamp(min=0)[:, None]).squeeze(-1)
    known[call.rows] = own_labels
    is_known = (labels == known) & (labels != UNTRAINED)
    loss = (call.lse - likely)[is_known].double()
    return MicroStep(
        ids=_numbers(call.ids),
        positions=_numbers(call.positions),
        labels=_numbers(labels.view_as(call.ids)),
        pull=float(pull[is_known].double().sum()) if bool(pull.isfinite().all()) else math.nan,
        doubt=float(-(-loss).expm1().sum()),
        loss_sum=float(loss.sum()),
        summed=int(is_known.sum()),
        valid_tokens=None if call.valid_tokens is None else int(call.valid_tokens),
    )


def _rows(logits_RV: Tensor) -> int:
    return max(1, CHUNK_NUMBERS // logits_RV.shape[1])


def _chunks(logits_RV: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = logits_RV.split(_rows(logits_RV))
    return parts


def _numbers(tensor: Tensor) -> np.ndarray:
    return np.array(tensor.cpu().numpy())
