"""torch has room for one profiler: a second one crashes the process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch.autograd.profiler
from torch.autograd.profiler import record_function
from torch.profiler import profile

from bench.config import ConfigError
from bench.ranks.out_of_memory import memory_of_error

Enter = Callable[[record_function], record_function]
STARTS = ("_prepare_profiler", "_enable_profiler")
"""What of torch starts every profiler."""


class Annotations:
    """What is annotated with torch's `record_function` from now on, and is still open when a profiler stops.

    torch writes an annotation's end to where its beginning was recorded, whichever profiler is on by then. Of
    a profiler that has stopped, that memory is free: a later profiler crashes the process. `profile.step()`
    leaves such an annotation open, and so does one that a traced step is the beginning or the middle of.
    """

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


class Traced:
    """A profiler that was started, and is ended before anybody else's is started."""

    def __init__(self, profiler: profile) -> None:
        self.failure: str | None = None
        """What the profiler said when it failed to start or to stop; None as long as it has not."""
        self._profiler = profiler
        self._plain = {name: getattr(torch.autograd.profiler, name) for name in STARTS}
        self._switch(profiler.start, "start")
        self.is_on = self.failure is None
        if self.is_on:
            self._annotations = Annotations()
            for name in STARTS:
                setattr(torch.autograd.profiler, name, partial(self._start_another, name))

    def end(self) -> None:
        """End the profiler, once."""
        if not self.is_on:
            return
        self.is_on = False
        for name, start in self._plain.items():
            setattr(torch.autograd.profiler, name, start)
        self._annotations.end()
        self._switch(self._profiler.stop, "stop")
        self._annotations.renew()

    def _switch(self, switch: Callable[[], None], what: str) -> None:
        """Memory that runs out is the cell's own end; any other error costs the trace alone."""
        try:
            switch()
        except Exception as error:  # kineto and its libraries may raise anything
            if memory_of_error(error) is not None:
                raise
            self.failure = f"the profiler did not {what}: {error}"

    def _start_another(self, name: str, *args: Any, **named: Any) -> Any:
        self.end()
        return self._plain[name](*args, **named)


@contextmanager
def tracing(profiler: profile) -> Iterator[Traced]:
    """Trace while the context lasts, and only while nobody else does.

    A profiler that fails to start or to stop is no error: `failure` of what is yielded says so.
    Raises ConfigError where another profiler is on, which is not touched, and at the end where one was
    started meanwhile, for which this one made room.
    """
    if _is_another_on():
        raise ConfigError(
            "steps cannot be traced while another profiler is on; end it before, or start later"
        )
    traced = Traced(profiler)
    try:
        yield traced
        made_room = not traced.is_on and traced.failure is None
    finally:
        traced.end()
    if made_room:
        raise ConfigError("a profiler was started in a step that was traced; start it before, or later")


def _is_another_on() -> bool:
    """Whether a profiler traces or warms up.

    torch does not say that one warms up: it was entered, and has no results yet. One that gathers those of
    several rounds may be in its next one.
    """
    found = (each for each in gc.get_objects() if type(each) is torch.autograd.profiler.profile)
    return torch.autograd.profiler._is_profiler_enabled or any(
        each.entered and (each.kineto_results is None or each.acc_events) for each in found
    )
