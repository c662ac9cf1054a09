"""Deferred errors of code that observes a step."""

from __future__ import annotations

from types import TracebackType


class DeferredErrors:
    """Context that stores the first error raised inside it, to be raised after the step.

    The step may be part of a user's training, which an error inside the step would end.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        """Raise the stored error, if there is one, and forget it."""
        first, self._first = self._first, None
        if first is not None:
            raise first
