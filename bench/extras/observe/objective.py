"""Check of the training objective: whether a loop trains the mean loss of its next tokens.

This module imports no torch. Functions whose names end in `_mistake` return a message, or None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.extras.observe.places import document_starts, find_places

UNTRAINED = -1
"""Label of a token whose loss has no weight."""
LIMITS: Mapping[str, float] = {"fp64": 1e-4, "fp32": 1e-3}
"""Largest relative error of weights and loss that passes, by dtype of attention."""
SIXTEEN_BIT_LIMIT = 2e-2
"""Largest relative error that passes in the dtypes that LIMITS does not name, which have 16 bits."""
OTHER_TARGETS_LIMIT = 0.01
"""Largest share of the negative gradient that rounding of a cross-entropy may leave to other tokens."""
MEAN = "the mean loss over all ranks' valid tokens"
NamedWeight = tuple[float, str]
"""Weight that each token's loss has in a micro-step, and text that names the rank and the micro-step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """Tokens that one call of the model trained on one rank, derived from the gradient of its logits.

    w_i is the weight of token i's loss, p_i the probability of its label. The three arrays are [sequences,
    tokens]. The sums are over tokens whose label is the next token of their sequence, and over tokens with a
    label whose next token is on another rank.
    """

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    """Labels of the loss; UNTRAINED for tokens without a gradient."""
    weighted_doubt: float
    """Sum of w_i * (1 - p_i); nan if any gradient is not finite."""
    doubt: float
    """Sum of 1 - p_i."""
    loss_sum: float
    """Sum of the losses, -log p_i."""
    next_tokens: int
    """Number of tokens in the sums."""
    other_targets: float
    """Share of the negative gradient of the logits that is not at the label: 0 for a cross-entropy with one
    label per token, and large for a loss with several targets per token."""
    valid_tokens: int | None
    """Number of labels that count among those passed to the model or, if none were passed, number of tokens
    with a gradient; None if it is not known whether a token was trained, because its loss is 0."""
    layer_share: float = 1.0
    """Gradient that the layers get of hidden states gathered before the head, as a multiple of the sum of all
    ranks' gradients of these states."""

    @property
    def weight(self) -> float | None:
        """Mean weight of a token's loss: nan if gradients are not finite, None if no token has p_i < 1."""
        if math.isnan(self.weighted_doubt):
            return self.weighted_doubt
        return None if self.doubt <= 0 else self.weighted_doubt / self.doubt

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with a label."""
        return int((self.labels != UNTRAINED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjective:
    """Tokens that one rank trained in a step, and the loss that its loop stated for this step."""

    micro_steps: Sequence[MicroStep]
    losses: Sequence[float]
    """Losses that the loop stated."""
    valid_tokens: float | None
    """Valid tokens of the whole step on this rank, as stated or counted in the labels passed to the model."""
    is_stated: bool
    """Whether the loop called `Observation.loss` in the step, with or without a value."""
    gradient_factor: float | None
    """Factor between the sum of all ranks' gradients and the gradient that the optimizer uses, such as
    1 / ranks if gradients are averaged; None if it is not known."""
    clips_local: bool = False
    """Whether this rank's gradient was clipped before the ranks' gradients were combined."""


def reason_not_compared(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]], dtype: str
) -> str | None:
    """Return why the objective was not compared; None if it was. See `objective_mistake`."""
    reason = _reason_unseen(ranks)
    if reason is not None:
        return reason
    if any(_places(calls, row) is None for _, calls, row in _sequences(ranks, groups)):
        return "the positions do not determine the order of the tokens"
    return _reason_scale_unknown(ranks, len(groups[0]), _limit(dtype))


def _reason_unseen(ranks: Sequence[RankObjective]) -> str | None:
    """Return why nothing is known of the tokens that the loop trains; None if they are known."""
    if not all(rank.is_stated for rank in ranks):
        return "the loop did not state its loss; call step.loss(loss, valid_tokens) in every step"
    calls = [rank.micro_steps for rank in ranks]
    if not all(calls):
        return "the model returned no per-token logits that received a gradient"
    if not any(call.trained_tokens for rank_calls in calls for call in rank_calls):
        return "the gradient of all logits was zero"
    if any(call.other_targets > OTHER_TARGETS_LIMIT for rank_calls in calls for call in rank_calls):
        return "the loss has several targets for each token, as in distillation or label smoothing"
    return None


def _reason_scale_unknown(ranks: Sequence[RankObjective], sequence_ranks: int, limit: float) -> str | None:
    """Return why the divisor of gradients, and with it the scale of the loss, is unknown; else None."""
    if any(rank.clips_local for rank in ranks):
        return (
            "each rank clipped its own gradients before they were combined, so that their sum has no known"
            " scale; combine the gradients of all ranks first, and clip the result"
        )
    if all(rank.gradient_factor is not None for rank in ranks):
        return None
    for count in dict.fromkeys((len(ranks), sequence_ranks)):
        if count > 1 and _states_mean_loss(ranks, limit, parts=count):
            return (
                f"the stated loss is {MEAN}, divided by {count}; this is right if gradients are summed over"
                f" {count} ranks and wrong if they are averaged, and which is done could not be measured"
            )
    return None


def objective_mistake(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]], dtype: str
) -> str | None:
    """Return a message about the first mistake in the objective; None if it is right or cannot be judged.

    Args:
        ranks: Objectives of all ranks, in rank order.
        groups: Ranks of every sequence group.
        dtype: Dtype of attention.
    """
    if _reason_unseen(ranks) is not None:
        return None
    limit, weights = _limit(dtype), [*_weights(ranks)]
    for weight, place in weights:
        if not math.isfinite(weight):
            return f"objective: the gradient of the logits of {place} is not finite"
    labels = (_label_mistake(*sequence) for sequence in _sequences(ranks, groups))
    wrong = next(filter(None, labels), None) or _gather_mistake(ranks) or _weight_mistake(weights, limit)
    if wrong is not None or _reason_scale_unknown(ranks, len(groups[0]), limit) is not None:
        return wrong
    return _scale_mistake(ranks, weights, limit, dtype) or _loss_mistake(ranks, limit)


def _limit(dtype: str) -> float:
    return LIMITS.get(dtype, SIXTEEN_BIT_LIMIT)


def _sequences(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[Sequence[int], Sequence[MicroStep], int]]:
    """Yield the ranks that share a sequence, the call of each of them, and the row of the sequence in it."""
    for group in groups:
        for calls in zip(*(ranks[rank].micro_steps for rank in group), strict=False):
            for row in range(min(len(call.ids) for call in calls)):
                yield group, calls, row


def _label_mistake(group: Sequence[int], calls: Sequence[MicroStep], row: int) -> str | None:
    """Return a message about the first wrong label of one sequence of `_sequences`.

    The label of a document's last token may be any token, as its next one may be in no batch.
    """
    places = _places(calls, row)
    if places is None:
        return None
    positions = np.concatenate([call.positions[row] for call in calls])
    ids = np.concatenate([call.ids[row] for call in calls])
    labels = np.concatenate([call.labels[row] for call in calls])
    ranks = np.repeat([*group], [call.positions.shape[1] for call in calls])
    in_order = np.argsort(places)
    positions, ids, labels, ranks = (values[in_order] for values in (positions, ids, labels, ranks))
    starts = np.array(document_starts(positions.tolist()))
    goes_on = starts[:-1] == starts[1:]
    wrong = np.flatnonzero(goes_on & (labels[:-1] != UNTRAINED) & (labels[:-1] != ids[1:]))
    if len(wrong):
        place = int(wrong[0])
        return (
            f"objective: rank {ranks[place]} trains position {place} on token {labels[place]}, but"
            f" the next token is {ids[place + 1]}; shift the labels of whole sequences by one before"
            " sharding"
        )
    return _shard_end_mistake(labels != UNTRAINED, ranks, goes_on)


def _places(calls: Sequence[MicroStep], row: int) -> list[int] | None:
    """Return the places of the tokens of one sequence, in rank order; None if they are not known."""
    return find_places([[call.positions[row].tolist()] for call in calls])


def _shard_end_mistake(is_trained: np.ndarray, ranks: np.ndarray, goes_on: np.ndarray) -> str | None:
    """Return a message if labels were shifted within shards.

    In this case the last token of every shard has no label, and all tokens next to such a token have one.
    `is_trained` and `ranks` are in the order of the sequence. `goes_on` says whether the next token belongs
    to the same document.
    """
    edges = np.flatnonzero((ranks[:-1] != ranks[1:]) & goes_on)
    neighbours = np.setdiff1d(np.concatenate([edges - 1, edges + 1]), [*edges, -1, len(ranks) - 1])
    if not len(edges) or is_trained[edges].any() or not len(neighbours) or not is_trained[neighbours].all():
        return None
    return (
        f"objective: the last token of each shard is not trained on, such as position {int(edges[0])} of rank"
        f" {ranks[edges[0]]}, because its label was cut off; shift the labels of whole sequences before"
        " sharding"
    )


def _gather_mistake(ranks: Sequence[RankObjective]) -> str | None:
    """Return a message if the layers get another gradient than the head of states gathered before it."""
    shares = {call.layer_share for rank in ranks for call in rank.micro_steps}
    share = next((share for share in shares if abs(share - 1) > SIXTEEN_BIT_LIMIT), None)
    if share is None:
        return None
    return (
        f"objective: hidden states are gathered before the head, and the layers get {share:.4g} times their"
        " gradient; sum it over the ranks in the backward of the gather"
    )


def _weight_mistake(weights: Sequence[NamedWeight], limit: float) -> str | None:
    """Return a message if tokens of different ranks or micro-steps have different weights."""
    if not weights:
        return None
    (low, low_place), (high, high_place) = min(weights), max(weights)
    if low > 0 and high <= low * (1 + limit):
        return None
    if low > 0:
        comparison = f"a token of {high_place} weighs {high / low:.4g} times one of {low_place}"
    else:
        comparison = f"a token of {high_place} has weight {high:.4g} and one of {low_place} {low:.4g}"
    return (
        f"objective: {comparison}, so the loss is not {MEAN}; divide each rank's sum of losses by the token"
        " count of all ranks and micro-steps, not by its own count"
    )


def _weights(ranks: Sequence[RankObjective]) -> Iterator[NamedWeight]:
    """Yield the weights of all micro-steps whose weight is known."""
    for rank, objective in enumerate(ranks):
        for number, call in enumerate(objective.micro_steps):
            suffix = "" if len(objective.micro_steps) == 1 else f", micro-step {number}"
            if call.weight is not None and call.trained_tokens:
                yield call.weight, f"rank {rank}{suffix}"


def _scale_mistake(
    ranks: Sequence[RankObjective], weights: Sequence[NamedWeight], limit: float, dtype: str
) -> str | None:
    """Return a message if gradients are a multiple of the gradients of the mean loss."""
    if not weights or not has_known_scale(ranks, dtype):
        return None
    count = sum(rank.valid_tokens or 0.0 for rank in ranks)
    gradient_factor = ranks[0].gradient_factor or 0.0
    factor = statistics.median(weight for weight, _ in weights) * count * gradient_factor
    if abs(factor - 1) <= limit:
        return None
    return (
        f"objective: gradients are {factor:.4g} times those of {MEAN} ({count:,.0f} tokens); the sum of all"
        f" ranks' gradients is divided by {1 / gradient_factor:g}, so call backward on each rank's sum of"
        f" losses times {1 / gradient_factor:g} / {count:.0f}"
    )


def has_known_scale(ranks: Sequence[RankObjective], dtype: str) -> bool:
    """Return whether the right size of gradients is known; a gradient scaler makes it unknown in fp16."""
    return dtype != "fp16" and all(
        rank.gradient_factor is not None and rank.valid_tokens is not None for rank in ranks
    )


def _loss_mistake(ranks: Sequence[RankObjective], limit: float) -> str | None:
    """Return a message if all ranks stated a loss, and it is not the mean loss.

    The stated loss may be the mean, or the value on which backward is called: its sum over the ranks, times
    the factor of gradients, is the mean.
    """
    parts = (1.0, len(ranks) * (ranks[0].gradient_factor or 0.0))
    if any(_states_mean_loss(ranks, limit, part) for part in parts) or not all(r.losses for r in ranks):
        return None
    stated = statistics.fmean(sum(rank.losses) for rank in ranks)
    return (
        f"objective: the stated loss is {stated:.6g}, but {MEAN} is {_mean_loss(ranks):.6g}; call backward on"
        " this mean and state it"
    )


def _states_mean_loss(ranks: Sequence[RankObjective], limit: float, parts: float = 1) -> bool:
    """Return whether `parts` times the stated loss, averaged over ranks, is the mean loss within `limit`.

    A rank may state the loss of each micro-step, or each micro-step's part of the step's loss.
    """
    if not all(rank.losses for rank in ranks):
        return False
    stated = (statistics.fmean(total(rank.losses) for rank in ranks) for total in (sum, statistics.fmean))
    mean = _mean_loss(ranks)
    return any(abs(parts * loss - mean) <= limit * abs(mean) for loss in stated)


def _mean_loss(ranks: Sequence[RankObjective]) -> float:
    """Return the mean loss over all trained tokens whose loss is known; nan if there are none."""
    calls = [call for rank in ranks for call in rank.micro_steps]
    count = sum(call.next_tokens for call in calls)
    return sum(call.loss_sum for call in calls) / count if count else math.nan
