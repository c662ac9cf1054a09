"""What each token's loss weighs and which label it has, seen from the gradient of the logits.

Of a cross-entropy l_i with weight w_i the gradient of the logits is w_i * (softmax_i - onehot(label_i)): its
one negative entry stands at the label, and its positive ones add up to w_i * (1 - p_i), with p_i the label's
probability. So weights and labels are what the loop trains on, whatever it states and wherever it divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.kept_errors import KeptErrors
from bench.observation.fed_tokens import tensors_given
from bench.observation.objective import UNTRAINED, MicroStep
from bench.passes.hook import Hook
from bench.strategies.strategy import IGNORED_LABEL

CHUNK_NUMBERS = 2**24
"""Logits that are looked at at once, in float32."""


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
    """Watches the logits of one step; `calls` are what it saw of each call of the model, in order.

    Only small tensors are kept: of each token some numbers, of the last one of a shard its logits.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.losses: list[Tensor | float] = []
        """What the loop says its loss is, by micro-step."""
        self.counts: list[Tensor | float] = []
        """What it says is the number of tokens behind it, on this rank."""
        self.stated: list[tuple[int, str, Tensor | float]] = []
        """All that the loop says, step by step."""
        self.is_told = self.is_looking = self.is_wanted = False
        self._calls: list[_Call] = []
        self._errors = KeptErrors()

    def tell(self, step: int, loss: Tensor | float | None, valid_tokens: Tensor | float | None) -> None:
        """The loop's own words; they are compared in the step that is looked at, and only kept in others."""
        self.is_wanted = True
        with self._errors:
            said = {"loss": (loss, self.losses), "number of valid tokens": (valid_tokens, self.counts)}
            for what, (number, of_looked_at) in said.items():
                if number is not None:
                    kept = number.detach().clone() if isinstance(number, Tensor) else number
                    self.stated.append((step, what, kept))
                    if self.is_looking:
                        of_looked_at.append(kept)
            self.is_told |= self.is_looking

    def stated_not_finite(self) -> tuple[int, str, float] | None:
        """The first step in which the loop stated something that is not finite, what, and its value."""
        numbers = ((step, what, float(torch.as_tensor(x).sum())) for step, what, x in self.stated)
        return next((each for each in numbers if not math.isfinite(each[-1])), None)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around one step, looked at anew, if the loop has told anything in those before."""
        if not self.is_wanted:
            yield
            return
        self.losses, self.counts, self._calls = [], [], []
        self.is_told, self.is_looking = False, True
        hook = self.network.register_forward_hook(Hook(self._see), with_kwargs=True)
        try:
            yield
        finally:
            self.is_looking = False
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
    labels = given.get("shift_labels", _shifted(given.get("labels")))
    valid = None if labels is None else (labels != IGNORED_LABEL).sum()
    return _Call(ids, positions, valid, lse, successors, likely, rows, logits_RV[rows].clone())


def _shifted(labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels[:, 1:]


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
