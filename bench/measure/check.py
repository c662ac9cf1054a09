"""One comparison that a cell's result had to pass. No torch."""

from __future__ import annotations

from msgspec import Struct

from bench.common.rules import Name, Whole


class Check(Struct, frozen=True, kw_only=True):
    """One comparison that a cell's result had to pass, and how far it reaches; or why it was not made."""

    what: Name
    """Name of the compared quantity; no other check of the cell has it."""
    against: str
    """Source that it was compared with."""
    tokens: Whole | None = None
    """Tokens of the compared sequence; null where nothing was compared along a sequence."""
    rows: Whole | None = None
    """Sampled tokens of that sequence; null where all were compared."""
    steps: Whole | None = None
    """Full-length steps of the cell that were compared; null where the check runs in a step of its own."""
    of_steps: Whole | None = None
    """Full-length steps that ran; null where the check is about a part of them by its nature."""
    compares_training: bool = False
    """Whether it compares loss and gradients of its steps with those of another computation. A step that no
    such check covers is compared with nothing."""
    reason: str | None = None
    """Why the check was not made, or not in all steps that it is about; null where it was."""
    below_noise: str | None = None
    """Known mistake that rounding would hide from it here, and both sizes; null where it would find all."""

    @property
    def is_missing(self) -> bool:
        """Whether it was not made; one that compares steps is counted by its steps instead."""
        counts_by_steps = self.compares_training and self.of_steps is not None
        return self.reason is not None and not self.steps and not counts_by_steps
