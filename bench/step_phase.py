"""In which part of a step a rank is: told by whoever runs the step, read by whoever watches it."""

from __future__ import annotations

from collections.abc import Callable

STEP_PARTS = ("load", "forward", "loss", "backward", "optimizer")
"""`load` is building the model and fetching a batch; `optimizer` is clipping, updating and clearing."""


class StepPhase:
    """`name` is the part of the step that runs now, None outside of any.

    `on_change` is called with the part that ends, before another begins; it must not fail.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.on_change: Callable[[str | None], None] | None = None

    def enter(self, name: str | None) -> None:
        """One part ends and the next begins; costs an attribute."""
        if self.on_change is not None:
            self.on_change(self.name)
        self.name = name
