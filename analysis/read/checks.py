"""What of one record was checked: how many of its checks were made, and how many of its steps are held."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from analysis.read.recorded import Check
from bench.common.labels import checks_label

BETWEEN_NAMES = "; "


def told(checks: Sequence[Check]) -> str:
    """Check by check what was made, and why the others were not, in one sentence."""
    return checks_label({check.what: check.reason if is_missing(check) else None for check in checks})


class Checked(Struct, frozen=True, kw_only=True):
    """One record's checks, counted."""

    listed: int
    made: int
    missing: str | None
    """The names of those that were not made or ended below the noise, with BETWEEN_NAMES; None where none."""
    steps: int | None
    """How many full-length steps should be held; None where nothing is trained."""
    held: int | None
    """How many the check that reaches furthest held: at least so many were."""


def checked(checks: Sequence[Check]) -> Checked:
    """The checks of a record, counted."""
    missing = [check.what for check in checks if is_missing(check)]
    missing += [f"{check.what} (below noise)" for check in checks if check.below_noise is not None]
    holding = [check for check in checks if check.holds_steps and check.of_steps is not None]
    return Checked(
        listed=len(checks),
        made=len(checks) - len(missing),
        missing=BETWEEN_NAMES.join(missing) or None,
        steps=max((check.of_steps or 0 for check in holding), default=None),
        held=max((check.steps or 0 for check in holding), default=None),
    )


def is_missing(check: Check) -> bool:
    """Whether it was not made; one that holds steps and had none to hold is counted by its steps instead."""
    counts_by_steps = check.holds_steps and check.of_steps is not None
    return check.reason is not None and not check.steps and not counts_by_steps
