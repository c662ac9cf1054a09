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


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """What one call of the model trained on, on one rank, as the gradient of its logits shows it."""

    ids: np.ndarray
    """[sequences, tokens], as are `positions` and `labels`."""
    positions: np.ndarray
    labels: np.ndarray
    """UNTRAINED where no gradient came."""
    pull: float
    """The sum of w_i * (1 - p_i) over the tokens that are counted in `summed`."""
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
        """What each token's loss is multiplied with; None where no token says so."""
        return self.pull / self.doubt if self.doubt > 0 else None

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


def not_compared(ranks: Sequence[RankObjective | None]) -> str | None:
    """Why the objective of a loop cannot be judged; None where it can."""
    if not all(rank is not None and rank.is_told for rank in ranks):
        return "the loop did not give its loss; call loss(loss, valid_tokens) of the context in every step"
    if not all(rank is not None and any(each.trained for each in rank.micro_steps) for rank in ranks):
        return "the model handed back no logits to which a gradient came"
    return None


def wrong_objective(
    seen: Sequence[RankObjective | None], groups: Sequence[Sequence[int]], dtype: str
) -> str | None:
    """What is wrong with it, in one line; None where nothing is, or where it cannot be judged.

    `seen` is by rank, `groups` are the ranks that share sequences, `dtype` is that of attention.
    """
    if not_compared(seen) is not None:
        return None
    ranks = [each for each in seen if each is not None]
    limit = LIMITS.get(dtype, SIXTEEN_BIT)
    labels = (_wrong_labels([ranks[rank] for rank in group], group) for group in groups)
    return (
        next(filter(None, labels), None)
        or _no_next_tokens(ranks)
        or _unequal_weights(ranks, limit)
        or _wrong_scale(ranks, limit, dtype)
        or _wrong_loss(ranks, limit)
    )


def _wrong_labels(sharers: Sequence[RankObjective], group: Sequence[int]) -> str | None:
    for calls in zip(*(each.micro_steps for each in sharers), strict=False):
        for row in range(min(len(call.ids) for call in calls)):
            found = _wrong_row(calls, row, group)
            if found is not None:
                return found
    return None


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
    unknown = (rank for rank, each in enumerate(ranks) if not any(call.summed for call in each.micro_steps))
    found = next(unknown, None)
    return None if found is None else f"objective: no label of rank {found} is the token that comes next"


def _unequal_weights(ranks: Sequence[RankObjective], limit: float) -> str | None:
    weights = [*_weights(ranks)]
    if not all(math.isfinite(weight) for weight, *_ in weights):
        return "objective: the gradient of the logits is not finite"
    (low, of_low), (high, of_high) = (pick(weights) for pick in (min, max))
    if low > 0 and high <= low * (1 + limit):
        return None
    times = f"{high / low:.4g} times" if low > 0 else "another sign than"
    return (
        f"objective: a token of {of_high} weighs {times} one of {of_low}, so the loss is not {MEAN}; divide"
        " each sum by the count of all ranks and micro-steps, not by the own one"
    )


def _weights(ranks: Sequence[RankObjective]) -> Iterator[tuple[float, str]]:
    """What a token's loss weighs, and where."""
    for rank, each in enumerate(ranks):
        for number, call in enumerate(each.micro_steps):
            where = f"rank {rank}" if len(each.micro_steps) == 1 else f"rank {rank}, micro-step {number}"
            if call.weight is not None and call.trained:
                yield call.weight, where


def _wrong_scale(ranks: Sequence[RankObjective], limit: float, dtype: str) -> str | None:
    """Gradients that are so many times those of the mean."""
    count = count_of(ranks)
    if count is None or not has_known_scale(ranks, dtype):
        return None
    weight = statistics.median(weight for weight, _ in _weights(ranks))
    times = weight * count / len(ranks)
    if abs(times - 1) <= limit:
        return None
    return (
        f"objective: gradients are {times:.4g} times those of {MEAN} ({count:,.0f} as counted): the engine"
        f" divides their sum by {len(ranks)} ranks, so each rank's loss is its sum times {len(ranks)} over"
        " that count"
    )


def has_known_scale(ranks: Sequence[RankObjective | None], dtype: str) -> bool:
    """Whether it is known how often gradients are divided; a scaler of fp16 multiplies them as it likes."""
    known = [each for each in ranks if each is not None and each.averages and each.valid_tokens is not None]
    return len(known) == len(ranks) and dtype != "fp16"


def _wrong_loss(ranks: Sequence[RankObjective], limit: float) -> str | None:
    """The mean over ranks of what each says, which may be of each micro-step or its part of the step's."""
    if not all(each.losses for each in ranks):
        return None
    calls = [call for each in ranks for call in each.micro_steps]
    exact = sum(call.loss_sum for call in calls) / sum(call.summed for call in calls)
    told = statistics.fmean(sum(each.losses) for each in ranks)
    mean = statistics.fmean(statistics.fmean(each.losses) for each in ranks)
    if any(abs(loss - exact) <= limit * abs(exact) for loss in (told, mean)):
        return None
    return f"objective: the loop's loss is {told:.6g}, {MEAN} is {exact:.6g}; say that one"


def count_of(ranks: Sequence[RankObjective]) -> float | None:
    """The valid tokens of all ranks; None where one does not say."""
    counts = [each.valid_tokens for each in ranks]
    return None if None in counts else float(sum(count for count in counts if count is not None))
