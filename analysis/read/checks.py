"""Summarises the checks of one record: which were made, and in how many steps training was compared."""

from __future__ import annotations

from collections.abc import Sequence

from bench.common.labels import checks_label
from bench.measure.check import Check

NAME_SEPARATOR = "; "


def checks_sentence(checks: Sequence[Check]) -> str:
    """Return `checked: tokens; not checked: objective (no loss)`, with the reason for each missing check."""
    return checks_label({check.what: check.reason if check.is_missing else None for check in checks})


def _missing_names(checks: Sequence[Check]) -> list[str]:
    """Return the names of the checks that were not made or ended below the noise."""
    names = [check.what for check in checks if check.is_missing]
    return names + [f"{check.what} (below noise)" for check in checks if check.below_noise is not None]


def missing_checks(checks: Sequence[Check]) -> str | None:
    """Return the names, as one text, of the checks that were not made or ended below the noise; else None."""
    return NAME_SEPARATOR.join(_missing_names(checks)) or None


def made_count(checks: Sequence[Check]) -> int:
    """Return the number of checks that were made and not below the noise."""
    return len(checks) - len(_missing_names(checks))


def _training_checks(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that compare the losses and gradients of full-length steps."""
    return [check for check in checks if check.compares_training and check.of_steps is not None]


def step_count(checks: Sequence[Check]) -> int | None:
    """Return the number of full-length training steps that ran; None where nothing is trained."""
    return max((check.of_steps or 0 for check in _training_checks(checks)), default=None)


def compared_step_count(checks: Sequence[Check]) -> int | None:
    """Return the number of steps that the check with the most steps compared; None where nothing is trained.

    This is a lower bound, because records do not say which steps a check compared.
    """
    return max((check.steps or 0 for check in _training_checks(checks)), default=None)
