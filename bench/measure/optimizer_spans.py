"""When the optimizer was at work in a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Spans = list[tuple[int, int]]
"""When something was entered and left, in `time.monotonic_ns`."""


@contextmanager
def method_spans(owner: object | None, method: str) -> Iterator[Spans]:
    """Calls of an object's method while the context lasts; none where there is no object."""
    spans_ns: Spans = []
    if owner is None:
        yield spans_ns
        return
    run = getattr(owner, method)

    def stamped() -> Any:
        start_ns = time.monotonic_ns()
        result = run()
        spans_ns.append((start_ns, time.monotonic_ns()))
        return result

    setattr(owner, method, stamped)
    try:
        yield spans_ns
    finally:
        delattr(owner, method)
