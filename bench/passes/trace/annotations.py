"""What is annotated with torch's `record_function` while a profiler is on, and is still open when it stops.

torch writes an annotation's end to where its beginning was recorded, whichever profiler is on by then. Of a
profiler that has stopped, that memory is free: a later profiler crashes the process. `profile.step()` leaves
such an annotation open, and so does one that a traced step is the beginning or the middle of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch.autograd.profiler import record_function

Enter = Callable[[record_function], record_function]


class Annotations:
    """Those begun from now on, until they are ended."""

    def __init__(self) -> None:
        self._begun: list[record_function] = []
        self._plain = record_function.__enter__
        record_function.__enter__ = self._noting(self._plain)  # type: ignore[method-assign]

    def end(self) -> None:
        """End what is open, while the profiler is still on; ending twice does nothing."""
        record_function.__enter__ = self._plain  # type: ignore[method-assign]
        for each in self._begun:
            # One that a future ends is out of reach: its end is bound to the record, not to the annotation.
            if each.run_callbacks_on_exit:
                torch.ops.profiler._record_function_exit._RecordFunction(each.record)

    def renew(self) -> None:
        """Let what was open end without effect, now that no profiler is on."""
        for each in self._begun:
            if each.run_callbacks_on_exit:
                each.record = torch.ops.profiler._record_function_enter_new(each.name, each.args)
        self._begun.clear()

    def _noting(self, enter: Enter) -> Enter:
        @wraps(enter)
        def noted(annotation: record_function) -> record_function:
            self._begun.append(annotation)
            return enter(annotation)

        return noted
