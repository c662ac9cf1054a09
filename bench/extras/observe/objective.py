"""Whether a loop trains the mean loss of its next tokens: judged from what the ranks saw. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

UNTRAINED = -1
"""The label of a token whose loss has no weight."""
LIMITS: Mapping[str, float] = {"fp64": 1e-4, "fp32": 1e-3}
"""How far weights and the loss may be off, relative; 16 bit has SIXTEEN_BIT."""
SIXTEEN_BIT = 2e-2
MEAN = "the mean loss over all ranks' valid tokens"
Weight = tuple[float, str]
"""What a token's loss weighs, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """What one call of the model trained on, on one rank, as the gradient of its logits shows it."""

    ids: np.ndarray
    """[sequences, tokens], as are `positions` and `labels`."""
    positions: np.ndarray
    labels: np.ndarray
    """UNTRAINED where no gradient came."""
    pull: float
    """The sum of w_i * (1 - p_i) over the tokens that are counted in `summed`; nan where any gradient is not
    finite."""
    doubt: float
    """The sum of 1 - p_i over the same."""
    loss_sum: float
    """The sum of their losses, -log p_i."""
    summed: int
    """How many tokens' label is the next token of their sequence, as far as this rank sees."""
    valid_tokens: int | None
    """How many labels the model was given that count; None where it was given none."""

    @property
    def weight(self) -> float | None:
        """What each token's loss is multiplied with, which may be nan; None where no token says so."""
        if math.isnan(self.pull):
            return self.pull
        return None if self.doubt <= 0 else self.pull / self.doubt

    @property
    def trained(self) -> int:
        return int((self.labels != UNTRAINED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjective:
    """One rank's step, and what its loop says of it."""

    micro_steps: Sequence[MicroStep]
    losses: Sequence[float]
    valid_tokens: float | None
    """Of the whole step on this rank, as the loop says, or by the labels that the model was given."""
    is_told: bool
    """Whether the loop gave its loss, or said that it trains this objective."""
    averages: bool
    """Whether the engine divides the sum of all ranks' gradients by their number, and nothing else does."""
    unknown_divisor: str | None = None
    """Why it is not known what the engine divides gradients by; None where `averages` says it."""


def not_compared(ranks: Sequence[RankObjective], sharers: int, dtype: str) -> str | None:
    """Why the objective of a loop was not compared; None where it was. `sharers` ranks share a sequence."""
    return _unseen(ranks) or _unknown_divisor(ranks, sharers, _limit(dtype))


def _unseen(ranks: Sequence[RankObjective]) -> str | None:
    """Why nothing is known of what the loop trains on."""
    if not all(rank.is_told for rank in ranks):
        return "the loop did not give its loss; call loss(loss, valid_tokens) of the context in every step"
    calls = [rank.micro_steps for rank in ranks]
    if not all(calls):
        return "the model handed back no logits of each token to which a gradient came"
    if not any(each.trained for rank in calls for each in rank):
        return "the gradient of all logits was zero"
    return None


def _unknown_divisor(ranks: Sequence[RankObjective], sharers: int, limit: float) -> str | None:
    """Why the scale is not judged: who divides decides what is right, and is not known."""
    reason = next((each.unknown_divisor for each in ranks if each.unknown_divisor is not None), None)
    if reason is not None or all(each.averages for each in ranks):
        return reason
    for count in dict.fromkeys((len(ranks), sharers)):
        if count > 1 and _is_loss(ranks, limit, parts=count):
            return (
                f"the loop's loss is {MEAN}, divided by {count}: right where gradients are added up over"
                f" {count} ranks, wrong where they are averaged, and it is not known what is done here"
            )
    return None


def wrong_objective(
    ranks: Sequence[RankObjective], groups: Sequence[Sequence[int]], dtype: str
) -> str | None:
    """What is wrong with it, in one line; None where nothing is, or where it cannot be judged.

    `ranks` are in their order, `groups` are the ranks that share sequences, `dtype` is that of attention.
    """
    if _unseen(ranks) is not None:
        return None
    limit, weights = _limit(dtype), [*_weights(ranks)]
    for weight, where in weights:
        if not math.isfinite(weight):
            return f"objective: the gradient of the logits of {where} is not finite"
    labels = (_wrong_labels([ranks[rank] for rank in group], group) for group in groups)
    found = next(filter(None, labels), None) or _no_next_tokens(ranks) or _unequal_weights(weights, limit)
    if found is not None or _unknown_divisor(ranks, len(groups[0]), limit) is not None:
        return found
    return _wrong_scale(ranks, weights, limit, dtype) or _wrong_loss(ranks, limit)


def _limit(dtype: str) -> float:
    return LIMITS.get(dtype, SIXTEEN_BIT)


def _wrong_labels(sharers: Sequence[RankObjective], group: Sequence[int]) -> str | None:
    by_call = zip(*(each.micro_steps for each in sharers), strict=False)
    rows = (
        _wrong_row(calls, row, group)
        for calls in by_call
        for row in range(min(len(each.ids) for each in calls))
    )
    return next(filter(None, rows), None)


def _wrong_row(calls: Sequence[MicroStep], row: int, group: Sequence[int]) -> str | None:
    """One sequence of a micro-step; packed ones, whose positions start anew, are not looked at."""
    positions = np.concatenate([call.positions[row] for call in calls])
    ids, labels = (np.concatenate([getattr(call, name)[row] for call in calls]) for name in ("ids", "labels"))
    ranks = np.repeat([*group], [call.positions.shape[1] for call in calls])
    order = positions.argsort(kind="stable")
    positions, ids, labels, ranks = (each[order] for each in (positions, ids, labels, ranks))
    if not np.array_equal(positions, np.arange(len(positions))):
        return None
    wrong = np.flatnonzero((labels[:-1] != UNTRAINED) & (labels[:-1] != ids[1:]))
    if len(wrong):
        place = int(wrong[0])
        return (
            f"objective: rank {ranks[place]} trains position {place} on token {labels[place]}, but token"
            f" {ids[place + 1]} comes next; shift the labels of whole sequences by one, before sharding"
        )
    return _untrained_edges(labels != UNTRAINED, ranks)


def _untrained_edges(is_trained: np.ndarray, ranks: np.ndarray) -> str | None:
    """Labels that were shifted within shards: all that end a rank's piece are missing, all around are not."""
    edges = np.flatnonzero(ranks[:-1] != ranks[1:])
    beside = np.setdiff1d(np.concatenate([edges - 1, edges + 1]), [*edges, -1, len(ranks) - 1])
    if not len(edges) or is_trained[edges].any() or not len(beside) or not is_trained[beside].all():
        return None
    return (
        f"objective: the last token of each shard is not trained on, such as position {int(edges[0])} of rank"
        f" {ranks[edges[0]]}: its label was cut off; shift the labels of whole sequences, before sharding"
    )


def _no_next_tokens(ranks: Sequence[RankObjective]) -> str | None:
    """Packed sequences' labels are not compared one by one, but some must be what comes next."""
    calls = [(rank, each.micro_steps) for rank, each in enumerate(ranks)]
    trained = (each for each in calls if any(call.trained for call in each[1]))
    found = next((rank for rank, each in trained if not any(call.summed for call in each)), None)
    return None if found is None else f"objective: no label of rank {found} is the token that comes next"


def _unequal_weights(weights: Sequence[Weight], limit: float) -> str | None:
    if not weights:
        return None
    (low, of_low), (high, of_high) = (pick(weights) for pick in (min, max))
    if low > 0 and high <= low * (1 + limit):
        return None
    times = f"{high / low:.4g} times" if low > 0 else "another sign than"
    return (
        f"objective: a token of {of_high} weighs {times} one of {of_low}, so the loss is not {MEAN}; divide"
        " each sum by the count of all ranks and micro-steps, not by the own one"
    )


def _weights(ranks: Sequence[RankObjective]) -> Iterator[Weight]:
    for rank, each in enumerate(ranks):
        for number, call in enumerate(each.micro_steps):
            where = f"rank {rank}" if len(each.micro_steps) == 1 else f"rank {rank}, micro-step {number}"
            if call.weight is not None and call.trained:
                yield call.weight, where


def _wrong_scale(
    ranks: Sequence[RankObjective], weights: Sequence[Weight], limit: float, dtype: str
) -> str | None:
    """Gradients that are so many times those of the mean."""
    if not weights or not has_known_scale(ranks, dtype):
        return None
    count = sum(each.valid_tokens or 0.0 for each in ranks)
    times = statistics.median(weight for weight, _ in weights) * count / len(ranks)
    if abs(times - 1) <= limit:
        return None
    return (
        f"objective: gradients are {times:.4g} times those of {MEAN} ({count:,.0f} as counted): the engine"
        f" divides their sum by {len(ranks)} ranks, so each rank's loss is its sum times {len(ranks)} over"
        " that count"
    )


def has_known_scale(ranks: Sequence[RankObjective], dtype: str) -> bool:
    """Whether it is known how often gradients are divided; a scaler of fp16 multiplies them as it likes."""
    return dtype != "fp16" and all(each.averages and each.valid_tokens is not None for each in ranks)


def _wrong_loss(ranks: Sequence[RankObjective], limit: float) -> str | None:
    if _is_loss(ranks, limit) or not all(each.losses for each in ranks):
        return None
    told = statistics.fmean(sum(each.losses) for each in ranks)
    return f"objective: the loop's loss is {told:.6g}, {MEAN} is {_exact(ranks):.6g}; say that one"


def _is_loss(ranks: Sequence[RankObjective], limit: float, parts: int = 1) -> bool:
    """Whether `parts` times the mean over ranks of what each says is the loss.

    They may say that of each micro-step, or its part of the step's.
    """
    if not all(each.losses for each in ranks):
        return False
    told = (statistics.fmean(each(rank.losses) for rank in ranks) for each in (sum, statistics.fmean))
    exact = _exact(ranks)
    return any(abs(parts * loss - exact) <= limit * abs(exact) for loss in told)


def _exact(ranks: Sequence[RankObjective]) -> float:
    """The mean over all tokens that were trained on; nan where none is known."""
    calls = [call for each in ranks for call in each.micro_steps]
    summed = sum(call.summed for call in calls)
    return sum(call.loss_sum for call in calls) / summed if summed else math.nan
