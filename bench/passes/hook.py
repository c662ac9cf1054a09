"""Hooks on a model that is not ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook that copies of the model do not have: a loop may copy or pickle its model within a step.

    A bound method would take the loop's wrapped model and its process groups into the copy.
    """

    run: Callable[..., None]

    def __call__(self, *given: Any) -> None:
        self.run(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Something that does nothing, and that is unpickled where there is no bench."""
        return getattr, (nullcontext(), "__exit__")
