"""Check of a cell's result, as its record stores it. No torch."""

from __future__ import annotations

from msgspec import Struct

from bench.common.rules import Name, NonNegativeInt


class Check(Struct, frozen=True, kw_only=True):
    """One comparison of a cell's result, with its extent, or with the reason why it was not made."""

    what: Name
    """Name of the compared quantity, unique among the checks of a cell."""
    against: str
    """Source of the values that the quantity is compared with."""
    tokens: NonNegativeInt | None = None
    """Number of tokens of the compared sequence; null if no sequence was compared."""
    rows: NonNegativeInt | None = None
    """Number of sampled tokens of the compared sequence; null if all tokens were compared."""
    steps: NonNegativeInt | None = None
    """Number of full-length steps that were compared; null if the check runs an extra step of its own."""
    of_steps: NonNegativeInt | None = None
    """Number of full-length steps that ran; null if the check never compares all of them."""
    compares_training: bool = False
    """True if the check compares loss and gradients of its steps with those of another computation. Nothing
    confirms the losses of a step that no such check covers."""
    reason: str | None = None
    """Reason why the check was not made, or not in all steps; null if it was made in all of them."""
    below_noise: str | None = None
    """Known mistake whose effect rounding would hide here, with both sizes; null without one."""

    @property
    def is_missing(self) -> bool:
        """True if the check was not made. A check that compares steps is counted by its steps instead."""
        counts_by_steps = self.compares_training and self.of_steps is not None
        return self.reason is not None and not self.steps and not counts_by_steps
