"""What a stack's model is given in a step, and what loss it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.ranks.log import StepPhase
from bench.training.data import FedTokens, count_valid
from bench.training.trainers.stack_data import SHIFT_LABELS


class StackSignal:
    """Hears of every call of the model; costs a few operations on [B, S] integers and scalars a call.

    A stack's loss is a mean: the mean over this rank's valid tokens, or the sum over `num_items_in_batch`.
    Times the number it was divided by it is the sum of token losses again.
    """

    def __init__(self, model: nn.Module, fed: FedTokens, phase: StepPhase) -> None:
        self.fed = fed
        self.phase = phase
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, with_kwargs=True)

    def take(self) -> tuple[Tensor, Tensor]:
        """This rank's loss sum and valid tokens since the last time."""
        loss_sum, valid = torch.stack(self._sums).sum(), torch.stack(self._counts).sum()
        self._sums.clear()
        self._counts.clear()
        return loss_sum, valid

    def add(self, mean_loss: Tensor, labels: Tensor, items: Tensor | float | None = None) -> None:
        """Note a loss that is the sum of token losses over `items`, or over the valid ones of `labels`."""
        valid = count_valid(labels)
        divisor = valid if items is None else items
        loss_sum = mean_loss.detach().float() * divisor
        self._sums.append(torch.where(valid > 0, loss_sum, torch.zeros_like(loss_sum)))
        self._counts.append(valid)

    def _enter(self, _model: nn.Module, _args: Any, named: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.phase.enter("forward")
            self.fed.add(named["input_ids"], named[SHIFT_LABELS], named["position_ids"])

    def _leave(self, _model: nn.Module, _args: Any, named: Mapping[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            self.phase.enter("backward")
            if getattr(output, "loss", None) is not None:
                self.add(output.loss, named[SHIFT_LABELS], named.get("num_items_in_batch"))
