"""Arithmetic on spans of time, which may overlap and nest: union, intersection, difference and total length.

Spans are NumPy arrays, because one traced step of a large model has millions of them. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Span = tuple[float, float]
"""Start and end."""
Spans = NDArray[np.float64]
"""Array [n, 2] of (start, end), in any order; spans may overlap."""


def spans_of(pairs: Iterable[Span] | Spans) -> Spans:
    """Return pairs of (start, end) as an array [n, 2]."""
    return np.asarray(pairs if isinstance(pairs, np.ndarray) else [*pairs], dtype=np.float64).reshape(-1, 2)


def union(spans: Iterable[Span] | Spans) -> Spans:
    """Return disjoint spans, in order, that cover exactly the time that `spans` cover."""
    spans = spans_of(spans)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    covered_until = np.maximum.accumulate(spans[:, 1])
    first_rows = np.flatnonzero(np.append(True, spans[1:, 0] > covered_until[:-1]))
    last_rows = np.append(first_rows[1:], len(spans)) - 1
    return np.stack([spans[first_rows, 0], covered_until[last_rows]], axis=1)


def length(spans: Iterable[Span] | Spans) -> float:
    """Return the time that at least one of the spans covers, in the unit of the spans."""
    merged = union(spans)
    return float((merged[:, 1] - merged[:, 0]).sum())


def intersect(first: Iterable[Span] | Spans, second: Iterable[Span] | Spans) -> Spans:
    """Return disjoint spans, in order, of the time that both arguments cover."""
    return _clip(union(first), union(second), in_second=True)


def subtract(first: Iterable[Span] | Spans, second: Iterable[Span] | Spans) -> Spans:
    """Return disjoint spans, in order, of the time that `first` covers and `second` does not."""
    return _clip(union(first), union(second), in_second=False)


def covers(merged: Spans, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask [n] that is true for times inside a span; the end of a span does not belong to it.

    `merged` must be disjoint and in order, as `union` returns spans.
    """
    if not len(merged):
        return np.zeros(len(times), dtype=np.bool_)
    row = np.searchsorted(merged[:, 0], times, side="right") - 1
    inside: NDArray[np.bool_] = (row >= 0) & (times < merged[row, 1])
    return inside


def _clip(first: Spans, second: Spans, *, in_second: bool) -> Spans:
    """Return the part of `first` inside `second`, or outside it; both must be as `union` returns spans."""
    edges = np.unique(np.concatenate([first.ravel(), second.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    middles = pieces.mean(axis=1)
    return union(pieces[covers(first, middles) & (covers(second, middles) == in_second)])
