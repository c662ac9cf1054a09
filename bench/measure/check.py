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
    """Tokens of the compared sequence; null where nothing was compared along a sequence."""
    rows: NonNegativeInt | None = None
    """Sampled tokens of the compared sequence; null where all tokens were compared."""
    steps: NonNegativeInt | None = None
    """Full-length steps of the cell that were compared; null where the check runs a step only for itself."""
    of_steps: NonNegativeInt | None = None
    """Full-length steps that ran; null where the check can only be about some of them."""
    compares_training: bool = False
    """True if the check compares loss and gradients of its steps with those of another computation. Losses of
    a step that no such check covers are compared with nothing."""
    reason: str | None = None
    """Reason why the check was not made, or not in all its steps; null where it was."""
    below_noise: str | None = None
    """Known mistake whose effect is smaller than rounding here, with both sizes; null if there is none."""

    @property
    def is_missing(self) -> bool:
        """True if the check was not made. A check that compares steps is counted by its steps instead."""
        counts_by_steps = self.compares_training and self.of_steps is not None
        return self.reason is not None and not self.steps and not counts_by_steps
