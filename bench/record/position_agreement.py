"""Comparison of losses by position in the first full-length step of two trainings of equal work."""

from __future__ import annotations

import math

from bench.measure.losses.section import PARTS, LossByPosition, PositionMatch

LIMIT_FACTOR = 2.0
"""Limit of the loss of one part of a sequence, as a multiple of the limit of the whole loss.

The noise behind that limit is the error of the mean over 32 tokens, and a part has more. Two updates have
passed before the first full-length step."""


def match_positions(
    losses: LossByPosition | None, reference: LossByPosition | None, loss_limit: float
) -> PositionMatch | None:
    """Return the comparison with the losses of a reference; None if one of the trainings has none.

    The match is that of the part or the boundary positions with the largest difference. `loss_limit` is the
    relative limit of the whole loss in the first step.
    """
    if losses is None or reference is None:
        return None
    parts: list[int | None] = [*range(len(reference.loss)), None]
    pairs = zip([*losses.loss, losses.boundary_loss], [*reference.loss, reference.boundary_loss], strict=True)
    matches = [
        _match(part, *pair, LIMIT_FACTOR * loss_limit) for part, pair in zip(parts, pairs, strict=True)
    ]
    return max(matches, key=lambda match: math.inf if match.difference is None else match.difference)


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


def _match(part: int | None, value: float | None, reference: float | None, limit: float) -> PositionMatch:
    difference: float | None = None
    if value is not None and reference is not None:
        difference = abs(value - reference) / (abs(reference) or 1.0)
    elif value is reference:  # neither training has a valid label there
        difference = 0.0
    return PositionMatch(part=part, value=value, reference=reference, difference=difference, limit=limit)


def _text(loss: float | None) -> str:
    return "missing" if loss is None else f"{loss:.6g}"
