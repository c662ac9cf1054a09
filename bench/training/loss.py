"""The loss: the sum of token losses over the number of valid tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from bench.ranks.log import StepPhase
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import InputDigest

CHUNK_TOKENS = 1024

LossSum = Callable[[nn.Module, Tensor, Tensor], Tensor]


def backward_loss(loss_sum: Tensor, valid_tokens: Tensor, gradient_divisor: int) -> Tensor:
    """What a rank runs backward on, so that averaged gradients are those of the global mean.

    `loss_sum` is this rank's sum of token losses, `valid_tokens` the count over all ranks and
    micro-steps. Engines divide the sum of gradients by `gradient_divisor` ranks; nothing else divides.
    """
    return loss_sum * (gradient_divisor / valid_tokens.clamp(min=1))


class ModelWithLoss(nn.Module):
    """A causal language model whose forward returns its sum of token losses.

    The loss is inside the root module: only there do engines gather the output head's weight.
    """

    def __init__(self, model: Any, loss: str, phase: StepPhase) -> None:
        super().__init__()
        self.fed = InputDigest()
        self.model = model
        self.loss_sum = LOSSES[loss]
        self.phase = phase

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        """The sum of this shard's token losses, a float32 (or float64) scalar."""
        self.fed.add(input_ids, labels, position_ids)
        hidden_BSH = self.model.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        self.phase.enter("loss")
        return self.loss_sum(self.model.lm_head, hidden_BSH.flatten(0, 1), labels.flatten())


def _untiled(head: nn.Module, hidden_RH: Tensor, labels_R: Tensor) -> Tensor:
    logits_RV: Tensor = head(hidden_RH)
    wide = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    return cross_entropy(wide, labels_R, ignore_index=IGNORED_LABEL, reduction="sum")


def _chunked(head: nn.Module, hidden_RH: Tensor, labels_R: Tensor) -> Tensor:
    """Logits of 1,024 rows at a time, computed again in backward: never all of [rows, vocabulary]."""
    chunks = zip(hidden_RH.split(CHUNK_TOKENS), labels_R.split(CHUNK_TOKENS), strict=True)
    sums = [
        checkpoint(_untiled, head, hidden, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in chunks
    ]
    return torch.stack(sums).sum()


LOSSES: Mapping[str, LossSum] = {"chunked": _chunked, "untiled": _untiled}
