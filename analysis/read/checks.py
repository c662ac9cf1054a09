"""Checks of one record: how many were made, and in how many steps training was compared."""

from __future__ import annotations

from collections.abc import Sequence

from bench.common.labels import checks_label
from bench.measure.check import Check

BETWEEN_NAMES = "; "


def checks_sentence(checks: Sequence[Check]) -> str:
    """Return one sentence on the checks that were made, and why the others were not."""
    return checks_label({check.what: check.reason if check.is_missing else None for check in checks})


def _missing(checks: Sequence[Check]) -> list[str]:
    """Return the names of the checks that were not made or ended below the noise."""
    missing = [check.what for check in checks if check.is_missing]
    return missing + [f"{check.what} (below noise)" for check in checks if check.below_noise is not None]


def missing(checks: Sequence[Check]) -> str | None:
    """Return the names of the checks that were not made or ended below the noise; None without any."""
    return BETWEEN_NAMES.join(_missing(checks)) or None


def made(checks: Sequence[Check]) -> int:
    """Return how many checks were made."""
    return len(checks) - len(_missing(checks))


def _of_training(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.compares_training and check.of_steps is not None]


def steps(checks: Sequence[Check]) -> int | None:
    """Return how many full-length steps should be compared; None where nothing is trained."""
    return max((check.of_steps or 0 for check in _of_training(checks)), default=None)


def compared_steps(checks: Sequence[Check]) -> int | None:
    """Return how many steps the check that reaches furthest compared: at least so many were."""
    return max((check.steps or 0 for check in _of_training(checks)), default=None)
