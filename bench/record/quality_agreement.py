"""Comparison of the scores of the same questions by the same weights under two strategies."""

from __future__ import annotations

import math

from msgspec.structs import replace

from bench.measure.quality.section import QualityMatch, QualitySection

NATS_PER_LIMIT = 10.0
"""Largest difference of a token's mean log-likelihood, in nats, over the relative limit of the loss.

That limit follows from the error of the mean of 32 tokens; a group of questions may have fewer, and unsure
answers have log-likelihoods of several nats. In sound bf16 cells of a trained model the difference was up to
2.6 times that limit."""


def match_quality(
    section: QualitySection | None, reference: QualitySection | None, cell_id: str, loss_limit: float
) -> QualitySection | None:
    """Return the section with the comparison with a reference; unchanged if one of the cells has none.

    Args:
        section: Scores to compare.
        reference: Scores of the same questions and weights.
        cell_id: Cell of the reference.
        loss_limit: Relative limit of the loss in the first step.
    """
    if section is None or reference is None or section.digest != reference.digest:
        return section
    matches = []
    for group in section.groups:
        value, expected = section.mean_log_likelihood(group), reference.mean_log_likelihood(group)
        match = QualityMatch(
            task=group[0],
            depth=group[1],
            value=value,
            reference=expected,
            difference=None if value is None or expected is None else abs(value - expected),
            limit=NATS_PER_LIMIT * loss_limit,
        )
        matches.append(match)
    first_beyond = next((match for match in matches if not match.is_within), None)
    largest = max(matches, key=lambda match: match.difference or 0.0)
    return replace(section, compared_with=cell_id, match=first_beyond or largest)


def describe_quality_departure(section: QualitySection | None) -> str | None:
    """Describe the first group of questions whose scores depart from the reference, if one does."""
    match = None if section is None else section.match
    if match is None or match.is_within:
        return None
    depth = "" if match.depth is None else f" at depth {match.depth * 100:.0f} %"
    value = math.nan if match.value is None else match.value
    return (
        f"quality: the mean log-likelihood of a token of the answers to {match.task}{depth} is {value:.4f},"
        f" not within {match.limit:.1e} of the {match.reference:.4f}"
    )
