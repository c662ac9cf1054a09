"""Errors of code that looks into a step while the step runs."""

from __future__ import annotations

from types import TracebackType


class KeptErrors:
    """A context around each look: its errors are kept, so that the step goes on, and raised once it is over.

    The step may be somebody else's, and whatever is raised inside of it ends their training.
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
        """Raise the first error that was kept, once; where there was none, nothing."""
        first, self._first = self._first, None
        if first is not None:
            raise first
