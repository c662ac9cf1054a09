"""A published number as it is compared: with what its digits leave open."""

from __future__ import annotations

import math
import re

from analysis.labels import number_label
from analysis.published.metrics import METRIC_TABLE
from analysis.published.registry import Claim


def claimed_range(claim: Claim) -> tuple[float, float]:
    """The published number with what its digits, or the chart it was read off, leave open."""
    value, error = float(claim.value), _half_a_digit(claim.value)
    chart = re.search(r"\+-\s*([\d.]+)", claim.read_from)
    error = max(error, float(chart[1])) if chart else error
    return value - error, value + error


def _half_a_digit(value: float) -> float:
    """Half a unit of the last digit that is not a trailing zero of a whole number."""
    text = repr(value).removesuffix(".0")
    if "e" in text:
        return abs(value) / 20
    whole, _, decimals = text.partition(".")
    return 0.5 * 10.0 ** -len(decimals) if decimals else 0.5 * 10.0 ** (len(whole) - len(whole.rstrip("0")))


def distance(claimed: tuple[float, float], found: tuple[float, float]) -> float:
    """The factor between two ranges that do not meet, 1 for those that do; from nothing it is infinite."""
    if claimed[0] > found[1]:
        return claimed[0] / found[1] if found[1] > 0 else math.inf
    return found[0] / claimed[1] if found[0] > claimed[1] else 1.0


def number_of(claim: Claim) -> str:
    """As it is read: `13,396 tokens/s`, `true`."""
    if isinstance(claim.value, bool):
        return str(claim.value).lower()
    return f"{number_label(claim.value)} {METRIC_TABLE[claim.metric].unit}"


def range_label(low: float, high: float) -> str:
    """`60.8 to 77.4`; one number where both read alike."""
    shown = number_label(low), number_label(high)
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"
