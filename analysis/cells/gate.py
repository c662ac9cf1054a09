"""Decides whether a cell became slower than a limit allows: `analysis.compare --fail-if-slower`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

from analysis.cells.difference import SpeedDifference
from bench.config import ConfigError


class GateVerdict(IntEnum):
    """Verdict on one cell or on a sweep; the value is the exit code."""

    PASSED = 0
    SLOWER = 1
    UNDECIDED = 3


def slowdown_limit(text: str) -> float:
    """Return the limit in `5%` as a share, 0.05.

    Raises:
        ConfigError: The text has no percent sign or is not from 0 % to below 100 %.
    """
    match = re.fullmatch(r"(\d{1,2}(?:\.\d+)?) ?%", text, re.ASCII)
    if match is None:
        raise ConfigError(
            f"--fail-if-slower {text}: must be a percentage from 0% to below 100%; write for example 5%"
        )
    return float(match[1]) / 100


def speed_verdict(difference: SpeedDifference, limit: float) -> GateVerdict:
    """Return the verdict on a cell's speed after over before; the whole interval must lie on one side."""
    if difference.low is None or difference.high is None:
        return GateVerdict.UNDECIDED
    if difference.high < 1 - limit:
        return GateVerdict.SLOWER
    return GateVerdict.PASSED if difference.low >= 1 - limit else GateVerdict.UNDECIDED


def sweep_verdict(verdicts: Iterable[GateVerdict]) -> GateVerdict:
    """Return SLOWER if a cell is slower, PASSED if every cell passed and there is one, else UNDECIDED."""
    found = set(verdicts)
    if GateVerdict.SLOWER in found:
        return GateVerdict.SLOWER
    return GateVerdict.PASSED if found == {GateVerdict.PASSED} else GateVerdict.UNDECIDED
