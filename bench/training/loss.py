"""Loss of a step: the sum of all token losses, divided by the number of valid tokens of all ranks.

A token is valid if its label is not IGNORED_LABEL. Shapes: B sequences of S tokens in a rank's shard, R = B*S
tokens, hidden size H, vocabulary V.
"""

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
from bench.training.position_losses import PositionLosses

CHUNK_TOKENS = 1024
"""Number of tokens whose logits the chunked loss holds at once."""

TokenLosses = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Function (output head, hidden states [R, H], labels [R]) that returns the loss of each token, [R]."""


def backward_loss(loss_sum: Tensor, valid_tokens: Tensor, gradient_divisor: int) -> Tensor:
    """Return the loss for `backward`; averaged by the engine, its gradients are those of the step's loss.

    Args:
        loss_sum: Sum of this rank's token losses in one micro-step.
        valid_tokens: Number of valid tokens of all ranks and micro-steps of the step.
        gradient_divisor: Number by which the engine divides the sum of gradients over ranks.
    """
    return loss_sum * (gradient_divisor / valid_tokens.clamp(min=1))


class ModelWithLoss(nn.Module):
    """Causal language model whose `forward` returns the sum of its token losses.

    The loss is computed in `forward`, because engines gather the output head's weight only in this module.
    """

    def __init__(self, model: Any, loss: str, phase: StepPhase) -> None:
        super().__init__()
        self.input_digest = InputDigest()
        self.position_losses = PositionLosses()
        self.model = model
        self.token_losses = LOSSES[loss]
        self.phase = phase

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, *, scores_labels: bool = False
    ) -> Tensor:
        """Return the sum of this shard's token losses, a float32 scalar (float64 for a float64 model).

        With `scores_labels` return the result of `label_scores` instead, [B, S, 2].
        """
        self.input_digest.add(input_ids, labels, position_ids)
        hidden_BSH = self.model.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        self.phase.enter("loss")
        if scores_labels:
            return label_scores(self.model.lm_head, hidden_BSH, labels)
        losses_R = self.token_losses(self.model.lm_head, hidden_BSH.flatten(0, 1), labels.flatten())
        self.position_losses.add(losses_R, labels, position_ids)
        return losses_R.sum()


def label_scores(head: nn.Module, hidden_BSH: Tensor, labels_BS: Tensor) -> Tensor:
    """Return for each valid label its log-likelihood and whether another token is more likely, [B, S, 2].

    Both are 0 for an ignored label. Logits are computed only for valid labels, of which there are few.
    """
    is_valid_BS = labels_BS != IGNORED_LABEL
    logits = head(hidden_BSH[is_valid_BS])  # also without rows, as an engine may gather the head's weight
    wide = logits if logits.dtype == torch.float64 else logits.float()
    labels = labels_BS[is_valid_BS]
    log_likelihood = wide.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    is_wrong = wide.argmax(-1) != labels
    scores = torch.zeros(*labels_BS.shape, 2, dtype=wide.dtype, device=wide.device)
    scores[is_valid_BS] = torch.stack([log_likelihood, is_wrong.to(wide.dtype)], dim=1)
    return scores


def untiled_losses(head: nn.Module, hidden_RH: Tensor, labels_R: Tensor) -> Tensor:
    """Return the loss of each token, [R], in float32 (float64 for float64 logits); 0 for an ignored label."""
    logits_RV: Tensor = head(hidden_RH)
    wide = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    return cross_entropy(wide, labels_R, ignore_index=IGNORED_LABEL, reduction="none")


def _chunked_losses(head: nn.Module, hidden_RH: Tensor, labels_R: Tensor) -> Tensor:
    """Return the loss of each token, [R], with the logits of at most CHUNK_TOKENS rows in memory.

    Backward computes the logits again.
    """
    chunks = zip(hidden_RH.split(CHUNK_TOKENS), labels_R.split(CHUNK_TOKENS), strict=True)
    losses = [
        checkpoint(untiled_losses, head, hidden, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in chunks
    ]
    return torch.cat(losses)


LOSSES: Mapping[str, TokenLosses] = {"chunked": _chunked_losses, "untiled": untiled_losses}
