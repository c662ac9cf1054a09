"""Spans of time as (start, end) pairs: merged before they are measured, because calls overlap and nest."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times covered, as disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Time that at least one of the spans covers, in the spans' unit."""
    return sum(end - start for start, end in union(spans))


def overlap(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Time that both cover, in the spans' unit."""
    first, second = list(first), list(second)
    return length(first) + length(second) - length([*first, *second])
