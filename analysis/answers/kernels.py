"""States which strategies ran on another kernel than the others, or on a stand-in for flash-attn."""

from __future__ import annotations

from itertools import combinations

from analysis.answers.wording import join_words
from analysis.cells.cells import Cells
from bench.strategies.stand_in import stand_in_lines

CUDNN = "cudnn"
"""Kernel that a sweep leaves if its first parity check fails."""


def kernel_lines(cells: Cells) -> list[str]:
    """Return a sentence on strategies without a common kernel, and lines on those that called a stand-in."""
    has_result = cells.frame["status"].eq("ok") & ~cells.are_observed
    kernels = cells.frame[has_result].groupby("strategy")["kernel"].agg(set)
    lines = []
    if any(one.isdisjoint(other) for one, other in combinations(kernels, 2)):
        parts = "; ".join(f"{strategy} on {join_words(sorted(names))}" for strategy, names in kernels.items())
        lines = [f"Not like for like: {parts}. A difference in speed is also that of the kernels."]
    failed = cells.frame["kernel"].eq(CUDNN) & ~cells.are_observed & ~has_result
    if failed.any() and len(kernels) and not any(CUDNN in names for names in kernels):
        lines.append(f"No cell on {CUDNN} has a result; the results are those of other kernels.")
    ran = cells.frame[has_result & ~cells.are_predicted]
    return [*lines, *stand_in_lines(zip(ran["strategy"], ran["kernel"], strict=True))]
