"""Spans of time as rows of (start, end): merged before they are measured, because calls overlap and nest.

Arrays, because one traced step of a large model holds millions of them. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Span = tuple[float, float]
Spans = NDArray[np.float64]
"""[n, 2], in any order, overlapping or not."""


def spans_of(pairs: Iterable[Span] | Spans) -> Spans:
    """The pairs as an array [n, 2]."""
    return np.asarray(pairs if isinstance(pairs, np.ndarray) else [*pairs], dtype=np.float64).reshape(-1, 2)


def union(spans: Iterable[Span] | Spans) -> Spans:
    """The same times covered, as disjoint spans in order; empty spans cover nothing."""
    found = spans_of(spans)
    found = found[found[:, 1] > found[:, 0]]
    if not len(found):
        return found
    found = found[np.argsort(found[:, 0], kind="stable")]
    covered_until = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.append(True, found[1:, 0] > covered_until[:-1]))
    last = np.append(first[1:], len(found)) - 1
    return np.stack([found[first, 0], covered_until[last]], axis=1)


def length(spans: Iterable[Span] | Spans) -> float:
    """Time that at least one of the spans covers, in the spans' unit."""
    merged = union(spans)
    return float((merged[:, 1] - merged[:, 0]).sum())


def intersect(first: Iterable[Span] | Spans, second: Iterable[Span] | Spans) -> Spans:
    """The times that both cover, as disjoint spans in order."""
    return _pieces(union(first), union(second), wanted=True)


def subtract(first: Iterable[Span] | Spans, second: Iterable[Span] | Spans) -> Spans:
    """The times that the first covers and the second does not, as disjoint spans in order."""
    return _pieces(union(first), union(second), wanted=False)


def covers(merged: Spans, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    """For each time whether the merged spans cover it, their ends left out."""
    if not len(merged):
        return np.zeros(len(times), dtype=np.bool_)
    at = np.searchsorted(merged[:, 0], times, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (times < merged[at, 1])
    return inside


def _pieces(first: Spans, second: Spans, *, wanted: bool) -> Spans:
    edges = np.unique(np.concatenate([first.ravel(), second.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    middles = pieces.mean(axis=1)
    return union(pieces[covers(first, middles) & (covers(second, middles) == wanted)])
