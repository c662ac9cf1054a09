"""Check of the training objective: whether a loop trains the mean loss of its next tokens. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.extras.observe.places import document_starts, find_places

UNTRAINED = -1
"""Label of a token whose loss has no weight."""
LIMITS: Mapping[str, float] = {"fp64": 1e-4, "fp32": 1e-3}
"""Largest relative error that passes, by dtype of attention; SIXTEEN_BIT_LIMIT for other dtypes."""
SIXTEEN_BIT_LIMIT = 2e-2
SPREAD_SHARE = 0.25
"""Share of the limit that the standard deviation of equal weights may reach."""
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
    """Weights of the losses; nan where the label is not the next token, and where a loss is near 0."""
    softmax_error: float
    """Larger error of the gradient in sampled columns, of its slope or of its size; inf without a slope or
    with several targets of a token, nan without a weight."""
    valid_tokens: int | None
    """Number of valid labels passed to the model; None if none were passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjective:
    """Tokens that one rank trained in a step, and the loss that its loop stated for this step."""

    micro_steps: Sequence[MicroStep] = ()
    valid_tokens: float | None = None
    """Valid tokens of the whole step on this rank, as stated or counted in the labels passed to the model."""
    is_stated: bool = False
    """Whether the loop called `Observation.loss`."""
    gradient_factor: float | None = None
    """Factor between the sum of all ranks' gradients and the optimizer's gradient; None if unknown."""
    reason: str | None = None
    """Reason why the trained tokens or their gradients are not known."""


@dataclass(frozen=True, slots=True)
class ObjectiveVerdict:
    """Result of the check: a mistake, a reason why it was not made, or neither."""

    mistake: str | None = None
    reason: str | None = None
    is_scale_known: bool = False


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """A call, row or tile of the loss: known weights of its tokens, number of its tokens, and its name."""

    weights: np.ndarray
    tokens: int
    name: str

    @property
    def weight(self) -> float:
        return float(self.weights.mean())


def judge_objective(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]], dtype: str
) -> ObjectiveVerdict:
    """Return the verdict on one step, from the ranks of every sequence group and the dtype of attention."""
    limit = LIMITS.get(dtype, SIXTEEN_BIT_LIMIT)
    is_stated = all(rank.is_stated for rank in ranks)
    reason = _why_not_known(ranks, limit)
    if reason is not None:
        return ObjectiveVerdict(reason=reason)
    for group in groups:
        for calls in zip(*(ranks[rank].micro_steps for rank in group), strict=False):
            for row in range(min(len(call.ids) for call in calls)):
                places = find_places([[call.positions[row].tolist()] for call in calls])
                if places is None:
                    return ObjectiveVerdict(reason="the positions do not determine the order of the tokens")
                mistake = _label_mistake(group, calls, row, np.argsort(places), is_stated=is_stated)
                if mistake is not None:
                    return ObjectiveVerdict(mistake)
    if not is_stated:
        return ObjectiveVerdict(reason=NOT_STATED)
    return _judge_weights(ranks, limit) or _judge_size(ranks, len(groups[0]), limit, dtype)


def _why_not_known(ranks: Sequence[RankObjective], limit: float) -> str | None:
    """Return why the loop is not seen to train a cross-entropy with one label a token; None if it is."""
    calls = [call for rank in ranks for call in rank.micro_steps]
    error = max((call.softmax_error for call in calls if not np.isnan(call.softmax_error)), default=0.0)
    reasons = {
        **{rank.reason: True for rank in ranks if rank.reason is not None},
        "the model returned no logits of each token that received a gradient": (
            not all(rank.micro_steps for rank in ranks)
        ),
        "the gradient of all logits was zero": not any((call.labels != UNTRAINED).any() for call in calls),
        "the gradient of the logits is not seen to be that of a plain cross-entropy, as with label smoothing,"
        " a teacher, a temperature, another term of the loss, or very even logits": error > limit,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


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
    """Return a message if the last token of every shard has no label, and the tokens next to it have one.

    `is_trained` and `ranks` are in the order of the sequence; `goes_on` if the document does.
    """
    edges = np.flatnonzero((ranks[:-1] != ranks[1:]) & goes_on)
    neighbours = np.setdiff1d(np.concatenate([edges - 1, edges + 1]), [*edges, -1, len(ranks) - 1])
    is_alone = is_trained[:-2] & ~is_trained[1:-1] & is_trained[2:] & goes_on[1:]
    is_chosen = not {*np.flatnonzero(is_alone) + 1} <= {*edges}  # other tokens are left out alone, too
    if is_chosen or is_trained[edges].any() or not len(neighbours) or not is_trained[neighbours].all():
        return None
    return (
        f"objective: the last token of each shard is not trained on, such as position {int(edges[0])} of rank"
        f" {ranks[edges[0]]}: labels were shifted after sharding, or cut off; shift the labels of whole"
        " sequences before sharding, and pass their shards as shift_labels"
    )


def _judge_weights(ranks: Sequence[RankObjective], limit: float) -> ObjectiveVerdict | None:
    """Return a verdict if tokens have different weights: a mistake, or another loss; else None."""
    calls = [
        (call, f"rank {rank}" + (f", micro-step {number}" if len(objective.micro_steps) > 1 else ""))
        for rank, objective in enumerate(ranks)
        for number, call in enumerate(objective.micro_steps)
    ]
    weights = _without_nan(np.concatenate([call.weights.ravel() for call, _ in calls]))
    if not len(weights):
        return ObjectiveVerdict(reason="no token shows a weight: losses near 0, or positions with gaps")
    if _is_even(weights, limit):
        return None
    for splits in zip(*(_splits(call, name, limit) for call, name in calls), strict=True):
        parts = [part for split in splits for part in split if len(part.weights)]
        if all(_is_even(part.weights, limit) for part in parts):
            parts.sort(key=lambda part: part.weight)
            low, high = parts[0], parts[-1]
            if _divide_by_own_counts(parts, limit):
                return ObjectiveVerdict(
                    f"objective: a token of {high.name} weighs {high.weight / low.weight:.4g} times one of"
                    f" {low.name}, so the loss is not {MEAN}; divide each sum of losses by the token count of"
                    " all ranks and micro-steps, not by its own count"
                )
    return ObjectiveVerdict(
        reason=f"weights of tokens in the loss are {weights.min():.4g} to {weights.max():.4g}: chosen as in a"
        " focal loss, or of tiles that are divided by their own counts"
    )


def _splits(call: MicroStep, name: str, limit: float) -> Iterator[list[WeightedPart]]:
    """Yield the whole call, its rows, and its tiles: runs of equal weights, or of unknown ones after them."""
    is_trained = call.labels != UNTRAINED
    yield [WeightedPart(_without_nan(call.weights), call.valid_tokens or int(is_trained.sum()), name)]
    rows = zip(call.weights, is_trained.sum(axis=1), strict=True)
    yield [WeightedPart(_without_nan(row), n, f"{name}, row {i}") for i, (row, n) in enumerate(rows)]
    weights = call.weights[is_trained]
    known = np.flatnonzero(~np.isnan(weights))
    if len(known):
        weights = weights[known[np.maximum(np.searchsorted(known, range(len(weights)), "right") - 1, 0)]]
    tiles = np.split(weights, np.flatnonzero(np.abs(np.diff(weights)) > 2 * limit * weights[:-1]) + 1)
    yield [WeightedPart(_without_nan(tile), len(tile), f"{name}, tile {i}") for i, tile in enumerate(tiles)]


def _is_even(weights: np.ndarray, limit: float) -> bool:
    mean = weights.mean()
    is_narrow = weights.std() <= SPREAD_SHARE * limit * mean and np.ptp(weights) <= 2 * limit * mean
    return bool(mean > 0 and is_narrow)


def _divide_by_own_counts(parts: Sequence[WeightedPart], limit: float) -> bool:
    """Return whether weight * tokens is the same for all parts, or for all parts of equal weight together."""
    totals: list[list[float]] = []
    for part in parts:  # by weight
        if not totals or part.weight > totals[-1][0] * (1 + 2 * limit):
            totals.append([part.weight, 0.0])
        totals[-1][1] += part.weight * part.tokens
    products = [part.weight * part.tokens for part in parts], [total for _, total in totals]
    return len(totals) > 1 and any(max(values) <= min(values) * (1 + 2 * limit) for values in products)


def _without_nan(weights: np.ndarray) -> np.ndarray:
    known: np.ndarray = weights[~np.isnan(weights)]
    return known


def _judge_size(
    ranks: Sequence[RankObjective], sequence_ranks: int, limit: float, dtype: str
) -> ObjectiveVerdict:
    """Return the verdict on the size of gradients; a size that the loop does not explain may be a weight."""
    counts, factor = [rank.valid_tokens for rank in ranks], ranks[0].gradient_factor
    trained = sum(int((call.labels != UNTRAINED).sum()) for rank in ranks for call in rank.micro_steps)
    is_of_all_ranks = len(ranks) > 1 and {*counts} == {float(trained)}
    if factor is None or None in counts or dtype == "fp16" or is_of_all_ranks:
        return ObjectiveVerdict()
    weights = np.concatenate([call.weights.ravel() for rank in ranks for call in rank.micro_steps])
    count, divisor = sum(count or 0.0 for count in counts), 1 / factor
    if abs(trained - count) > SIXTEEN_BIT_LIMIT * count:
        return ObjectiveVerdict(reason=f"{trained:,} tokens have a gradient, and {count:,.0f} are valid")
    scale = float(np.median(_without_nan(weights))) * count * factor
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
