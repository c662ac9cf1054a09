"""Comparison of losses by position in the first full-length step of two trainings of equal work."""

from __future__ import annotations

import math

from bench.measure.losses.section import PARTS, LossByPosition, PositionMatch

LIMIT_FACTOR = 2.0
"""Limit of the loss of a part with NOISE_TOKENS labels or more, over the limit of the whole loss.

Two updates have passed before the first full-length step."""
NOISE_TOKENS = 128
"""Number of labels below which the limit of a part grows. Mean losses of 32 labels of sound trained cells
differed by up to 1.13 times the limit of many labels."""


def match_positions(
    losses: LossByPosition | None, reference: LossByPosition | None, loss_limit: float
) -> PositionMatch | None:
    """Return the comparison with the losses of a reference; None if one of the trainings has none.

    The match is that of the part or the boundary positions that is nearest to its limit. Boundary positions
    are compared if both trainings have their loss.

    Args:
        losses: Losses to compare.
        reference: Losses of a training of equal work.
        loss_limit: Relative limit of the whole loss in the first step.
    """
    if losses is None or reference is None:
        return None
    counts = reference.valid_tokens
    summed = zip(reference.loss, counts, strict=False)
    mean = sum((loss or 0.0) * count for loss, count in summed) / max(1, sum(counts[: len(reference.loss)]))
    pairs = [*enumerate(zip(losses.loss, reference.loss, strict=True))]
    matches = [_match(part, *pair, mean, loss_limit, counts[part]) for part, pair in pairs]
    if losses.boundary_loss is not None and reference.boundary_loss is not None:
        pair = losses.boundary_loss, reference.boundary_loss
        matches.append(_match(None, *pair, mean, loss_limit, counts[-1]))
    return max(matches, key=_nearness)


def _nearness(match: PositionMatch) -> float:
    return math.inf if match.difference is None else match.difference / match.limit


def describe_departure(match: PositionMatch | None, seq_len: int) -> str | None:
    """Describe the positions whose loss departs most from the reference, if it exceeds the limit."""
    if match is None or match.is_within:
        return None
    where = "at the ends of shards"
    if match.part is not None:
        first, end = (-(-seq_len * part // PARTS) for part in (match.part, match.part + 1))
        where = f"of positions {first} to {end - 1}"
    return (
        f"step 0: the mean loss {where} is {_text(match.value)}, not within {match.limit:.1e} of the"
        f" {_text(match.reference)}"
    )


def _match(
    part: int | None,
    value: float | None,
    reference: float | None,
    mean: float,
    loss_limit: float,
    labels: int,
) -> PositionMatch:
    """Return the comparison of one part, relative to its loss or to the mean loss, if that is larger."""
    difference: float | None = None
    if value is not None and reference is not None:
        difference = abs(value - reference) / (max(abs(reference), abs(mean)) or 1.0)
    elif value is reference:  # neither training has a valid label there
        difference = 0.0
    limit = LIMIT_FACTOR * loss_limit * math.sqrt(max(1.0, NOISE_TOKENS / max(1, labels)))
    return PositionMatch(part=part, value=value, reference=reference, difference=difference, limit=limit)


def _text(loss: float | None) -> str:
    return "missing" if loss is None else f"{loss:.6g}"
