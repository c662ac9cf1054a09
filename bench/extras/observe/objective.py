"""Check of the training objective: whether a loop trains the mean loss of its next tokens.

A loop is wrong only if everything that the comparison assumes was seen: a cross-entropy with one label for
each token, and a mistake that explains the numbers. Any other loss is not judged. This module imports no
torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.extras.observe.places import document_starts, find_places

UNTRAINED = -1
"""Label of a token whose loss has no weight."""
LIMITS: Mapping[str, float] = {"fp64": 1e-4, "fp32": 1e-3}
"""Largest relative error of weights and loss that passes, by dtype of attention."""
SIXTEEN_BIT_LIMIT = 2e-2
"""Largest relative error that passes in the dtypes that LIMITS does not name, which have 16 bits."""
SPREAD_SHARE = 0.25
"""Share of the limit that the standard deviation of equal weights may reach."""
OTHER_TARGETS_LIMIT = 0.01
"""Largest share of the negative gradient that rounding of a cross-entropy may leave to other tokens."""
MEAN = "the mean loss over all ranks' valid tokens"
NOT_STATED = "the loop did not state its loss; call step.loss(loss, valid_tokens) in every step"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """Tokens that one call of the model trained on one rank, derived from the gradient of its logits.

    The arrays are [sequences, tokens].
    """

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    """Labels of the loss; UNTRAINED for tokens without a gradient."""
    weights: np.ndarray
    """Weights of the losses of tokens whose label is the next token; nan for others, and where a loss is near
    0."""
    other_targets: float
    """Share of the negative gradient of the logits that is not at the label, 0 for a cross-entropy."""
    softmax_errors: tuple[float, float] | None
    """Errors of the gradient in sampled columns: of its slope over the logits, and of its size, as
    differences of logarithms. None if they do not show the slope."""
    valid_tokens: int | None
    """Number of labels that count among those passed to the model; None if none were passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjective:
    """Tokens that one rank trained in a step, and the loss that its loop stated for this step."""

    micro_steps: Sequence[MicroStep] = ()
    valid_tokens: float | None = None
    """Valid tokens of the whole step on this rank, as stated or counted in the labels passed to the model."""
    is_stated: bool = False
    """Whether the loop called `Observation.loss` in the step."""
    has_value: bool = False
    """Whether the loop stated a value."""
    gradient_factor: float | None = None
    """Factor between the sum of all ranks' gradients and the gradient that the optimizer uses, such as
    1 / ranks if gradients are averaged; None if it is not known."""
    clips_local: bool = False
    """Whether this rank's gradient was clipped before the ranks' gradients were combined."""
    reason: str | None = None
    """Reason why the trained tokens are not known; None if they are."""


@dataclass(frozen=True, slots=True)
class ObjectiveVerdict:
    """Result of the check: a mistake, a reason why it was not made, or neither."""

    mistake: str | None = None
    reason: str | None = None
    is_scale_known: bool = False
    """Whether the size of the gradients was compared."""


def judge_objective(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]], dtype: str
) -> ObjectiveVerdict:
    """Return the verdict on one step.

    Args:
        ranks: Objectives of all ranks, in rank order.
        groups: Ranks of every sequence group.
        dtype: Dtype of attention.
    """
    limit = LIMITS.get(dtype, SIXTEEN_BIT_LIMIT)
    is_stated = all(rank.is_stated for rank in ranks)
    reason = _why_not_known(ranks, limit)
    if reason is not None:
        return ObjectiveVerdict(reason=reason)
    labels = _judge_labels(ranks, groups, is_stated=is_stated)
    if labels is not None:
        return labels
    if not is_stated:
        return ObjectiveVerdict(reason=NOT_STATED)
    return _judge_weights(ranks, limit) or _judge_size(ranks, len(groups[0]), limit, dtype)


def _why_not_known(ranks: Sequence[RankObjective], limit: float) -> str | None:
    """Return why the loop is not seen to train a cross-entropy with one label a token; None if it is."""
    calls = [call for rank in ranks for call in rank.micro_steps]
    is_promised = any(rank.is_stated and not rank.has_value for rank in ranks)
    errors = [call.softmax_errors for call in calls if not np.isnan(call.weights).all()]
    reasons = {
        "the model returned no logits of each token that received a gradient": (
            not all(rank.micro_steps for rank in ranks)
        ),
        "the gradient of all logits was zero": not any((call.labels != UNTRAINED).any() for call in calls),
        "the model was given no labels and the loop stated no value, so its loss is computed elsewhere, as"
        " with label smoothing or compute_loss_func": is_promised
        and not all(call.valid_tokens is not None for call in calls),
        "the loss has several targets for each token, as in distillation or label smoothing": any(
            call.other_targets > OTHER_TARGETS_LIMIT for call in calls
        ),
        "the logits are too even to tell a cross-entropy from other losses": None in errors,
        "the gradient of the logits is not that of a plain cross-entropy, as with label smoothing, a"
        " temperature or another term of the loss": any(
            max(map(abs, error)) > limit for error in errors if error is not None
        ),
    }
    unseen = (rank.reason for rank in ranks if rank.reason is not None)
    return next(unseen, None) or next((reason for reason, applies in reasons.items() if applies), None)


def _judge_labels(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]], *, is_stated: bool
) -> ObjectiveVerdict | None:
    """Return a verdict if labels are not next tokens or the order of tokens is not known, else None."""
    for group in groups:
        for calls in zip(*(ranks[rank].micro_steps for rank in group), strict=False):
            for row in range(min(len(call.ids) for call in calls)):
                places = find_places([[call.positions[row].tolist()] for call in calls])
                if places is None:
                    return ObjectiveVerdict(reason="the positions do not determine the order of the tokens")
                mistake = _label_mistake(group, calls, row, np.argsort(places), is_stated=is_stated)
                if mistake is not None:
                    return ObjectiveVerdict(mistake)
    return None


def _label_mistake(
    group: Sequence[int], calls: Sequence[MicroStep], row: int, in_order: np.ndarray, *, is_stated: bool
) -> str | None:
    """Return a message about the first wrong label of one sequence, whose tokens `in_order` sorts.

    The label of a document's last token may be any token, as its next one may be in no batch. Without a
    stated loss only labels that a model was given, and has shifted itself, are known to be next tokens.
    """
    positions = np.concatenate([call.positions[row] for call in calls])[in_order]
    ids = np.concatenate([call.ids[row] for call in calls])[in_order]
    labels = np.concatenate([call.labels[row] for call in calls])[in_order]
    ranks = np.repeat([*group], [call.positions.shape[1] for call in calls])[in_order]
    starts = np.array(document_starts(positions.tolist()))
    goes_on = starts[:-1] == starts[1:]
    wrong = np.flatnonzero(goes_on & (labels[:-1] != UNTRAINED) & (labels[:-1] != ids[1:]))
    if is_stated and len(wrong):
        place = int(wrong[0])
        return (
            f"objective: rank {ranks[place]} trains position {place} on token {labels[place]}, but"
            f" the next token is {ids[place + 1]}; shift the labels of whole sequences, once,"
            " before sharding"
        )
    if is_stated or all(call.valid_tokens is not None for call in calls):
        return _shard_end_mistake(labels != UNTRAINED, ranks, goes_on)
    return None


def _shard_end_mistake(is_trained: np.ndarray, ranks: np.ndarray, goes_on: np.ndarray) -> str | None:
    """Return a message if labels were shifted within shards.

    In this case the last token of every shard has no label, and all tokens next to such a token have one.
    `is_trained` and `ranks` are in the order of the sequence. `goes_on` says whether the next token belongs
    to the same document.
    """
    edges = np.flatnonzero((ranks[:-1] != ranks[1:]) & goes_on)
    neighbours = np.setdiff1d(np.concatenate([edges - 1, edges + 1]), [*edges, -1, len(ranks) - 1])
    is_alone = is_trained[:-2] & ~is_trained[1:-1] & is_trained[2:] & goes_on[1:]
    is_elsewhere = not {*np.flatnonzero(is_alone) + 1} <= {*edges}  # tokens are left out on purpose
    if is_elsewhere or not len(edges) or is_trained[edges].any():
        return None
    if not len(neighbours) or not is_trained[neighbours].all():
        return None
    return (
        f"objective: the last token of each shard is not trained on, such as position {int(edges[0])} of rank"
        f" {ranks[edges[0]]}: labels were shifted after sharding, or cut off; shift the labels of whole"
        " sequences before sharding, and pass their shards as shift_labels"
    )


def _judge_weights(ranks: Sequence[RankObjective], limit: float) -> ObjectiveVerdict | None:
    """Return a verdict if tokens have different weights; None if all weights are equal.

    It is a mistake if each call, row or tile is divided by its own number of tokens; else it is another loss.
    """
    calls = [
        (call, f"rank {rank}" + (f", micro-step {number}" if len(objective.micro_steps) > 1 else ""))
        for rank, objective in enumerate(ranks)
        for number, call in enumerate(objective.micro_steps)
    ]
    weights = _without_nan(np.concatenate([call.weights.ravel() for call, _ in calls]))
    if not len(weights):
        return ObjectiveVerdict(
            reason="no token shows a weight, as losses are near 0 or positions skip numbers"
        )
    if _is_even(weights, limit):
        return None
    by_call = [
        (_without_nan(call.weights), call.valid_tokens or (call.labels != UNTRAINED).sum(), place)
        for call, place in calls
    ]
    by_row = [
        (_without_nan(call.weights[row]), (call.labels[row] != UNTRAINED).sum(), f"{place}, row {row}")
        for call, place in calls
        for row in range(len(call.ids))
    ]
    by_tile = [
        (tile, len(tile), f"{place}, tile {number}")
        for call, place in calls
        for number, tile in enumerate(_tiles(call.weights[call.labels != UNTRAINED], limit))
    ]
    for parts in (by_call, by_row, by_tile):
        known = [part for part in parts if len(part[0])]
        if not all(_is_even(part_weights, limit) for part_weights, _, _ in known):
            continue
        ordered = sorted(
            (float(part_weights.mean()), int(tokens), place) for part_weights, tokens, place in known
        )
        if _divide_by_own_counts([(weight, tokens) for weight, tokens, _ in ordered], limit):
            (low, _, low_place), (high, _, high_place) = ordered[0], ordered[-1]
            return ObjectiveVerdict(
                f"objective: a token of {high_place} weighs {high / low:.4g} times one of {low_place}, so the"
                f" loss is not {MEAN}; divide each sum of losses by the token count of all ranks and"
                " micro-steps, not by its own count"
            )
    return ObjectiveVerdict(
        reason=f"weights of tokens in the loss are {weights.min():.4g} to {weights.max():.4g}: chosen as in a"
        " focal loss, or of tiles that are divided by their own counts"
    )


def _tiles(weights: np.ndarray, limit: float) -> list[np.ndarray]:
    """Return runs of equal weights; a token whose weight is not known belongs to the run before it."""
    known = np.flatnonzero(~np.isnan(weights))
    if not len(known):
        return []
    filled = weights[known[np.maximum(np.searchsorted(known, np.arange(len(weights)), "right") - 1, 0)]]
    return np.split(filled, np.flatnonzero(np.abs(np.diff(filled)) > 2 * limit * filled[:-1]) + 1)


def _is_even(weights: np.ndarray, limit: float) -> bool:
    mean = weights.mean()
    is_narrow = weights.std() <= SPREAD_SHARE * limit * mean and np.ptp(weights) <= 2 * limit * mean
    return bool(mean > 0 and is_narrow)


def _divide_by_own_counts(parts: Sequence[tuple[float, int]], limit: float) -> bool:
    """Return whether weight * tokens is the same for all parts, or for all parts of equal weight together."""
    totals: list[list[float]] = []
    for weight, tokens in parts:  # by weight
        if not totals or weight > totals[-1][0] * (1 + 2 * limit):
            totals.append([weight, 0.0])
        totals[-1][1] += weight * tokens
    products = [weight * tokens for weight, tokens in parts], [total for _, total in totals]
    return len(totals) > 1 and any(max(values) <= min(values) * (1 + 2 * limit) for values in products)


def _without_nan(weights: np.ndarray) -> np.ndarray:
    known: np.ndarray = weights[~np.isnan(weights)]
    return known


def _judge_size(
    ranks: Sequence[RankObjective], sequence_ranks: int, limit: float, dtype: str
) -> ObjectiveVerdict:
    """Return the verdict on the size of gradients.

    A size that no number of the loop explains may be a weight of the loss.
    """
    if any(rank.clips_local for rank in ranks):
        return ObjectiveVerdict(
            reason="each rank clipped its own gradients before they were combined, so that their sum has no"
            " known scale; combine the gradients of all ranks first, and clip the result"
        )
    counts, factor = [rank.valid_tokens for rank in ranks], ranks[0].gradient_factor
    trained = [sum((call.labels != UNTRAINED).sum() for call in rank.micro_steps) for rank in ranks]
    is_of_all_ranks = len(ranks) > 1 and {*counts} == {float(sum(trained))}
    if factor is None or None in counts or dtype == "fp16" or is_of_all_ranks:
        return ObjectiveVerdict()
    weights = np.concatenate([call.weights.ravel() for rank in ranks for call in rank.micro_steps])
    count = sum(count or 0.0 for count in counts)
    scale, divisor = float(np.median(_without_nan(weights))) * count * factor, 1 / factor
    if abs(scale - 1) <= limit:
        return ObjectiveVerdict(is_scale_known=True)
    size = f"gradients are {scale:.4g} times those of {MEAN} ({count:,.0f} tokens)"
    numbers = _numbers_of_loop(ranks, sequence_ranks)
    if not any(abs(value - 1) <= limit for number in numbers for value in (scale / number, scale * number)):
        return ObjectiveVerdict(reason=f"{size}, which may be a weight of the loss")
    return ObjectiveVerdict(
        f"objective: {size}; the sum of all ranks' gradients is divided by {divisor:g}, so call backward on"
        f" each rank's sum of losses times {divisor:g} / {count:.0f}"
    )


def _numbers_of_loop(ranks: Sequence[RankObjective], sequence_ranks: int) -> set[float]:
    """Return the numbers by which a loop may multiply or divide once too often."""
    counts = [rank.valid_tokens or 0.0 for rank in ranks]
    small = (1, len(ranks), sequence_ranks, len(ranks) // sequence_ranks, len(ranks[0].micro_steps))
    products = {float(a * b) for a, b in itertools.combinations_with_replacement(small, 2)}
    all_tokens = sum(call.ids.size for rank in ranks for call in rank.micro_steps)
    return (products | {sum(counts), *(sum(counts) / part for part in (*counts, all_tokens) if part)}) - {0.0}
