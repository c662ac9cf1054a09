"""Profiling with torch.profiler while no other profiler runs: two at a time crash the process."""

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
from bench.ranks.out_of_memory import exhausted_resource

Enter = Callable[[record_function], record_function]
START_FUNCTIONS = ("_prepare_profiler", "_enable_profiler")
"""Functions of torch.autograd.profiler; a profiler calls one of them when it starts."""


class OpenAnnotations:
    """`record_function` annotations that begin from now on and may be open when a profiler stops.

    torch writes the end of an annotation to the memory in which its beginning was recorded, even if the
    profiler that owned the memory has stopped. The write then crashes the process under a later profiler.
    `profile.step()` leaves such an annotation open, and an annotation that begins in a traced step may end
    after it. Call `end` just before the profiler stops and `renew` just after.
    """

    def __init__(self) -> None:
        self._begun: list[record_function] = []
        self._original_enter = record_function.__enter__
        record_function.__enter__ = self._recording(self._original_enter)  # type: ignore[method-assign]

    def end(self) -> None:
        """End the open annotations while the profiler still runs, and record no more of them."""
        record_function.__enter__ = self._original_enter  # type: ignore[method-assign]
        for annotation in self._begun:
            # An annotation that a future ends cannot be ended here: its end is bound to the record itself.
            if annotation.run_callbacks_on_exit:
                torch.ops.profiler._record_function_exit._RecordFunction(annotation.record)

    def renew(self) -> None:
        """Give open annotations a new record, now that no profiler runs, so that their end has no effect."""
        for annotation in self._begun:
            if annotation.run_callbacks_on_exit:
                annotation.record = torch.ops.profiler._record_function_enter_new(
                    annotation.name, annotation.args
                )
        self._begun.clear()

    def _recording(self, enter: Enter) -> Enter:
        @wraps(enter)
        def record_and_enter(annotation: record_function) -> record_function:
            self._begun.append(annotation)
            return enter(annotation)

        return record_and_enter


class RunningProfiler:
    """A started profiler, which stops before any other profiler starts."""

    def __init__(self, profiler: profile) -> None:
        self.failure: str | None = None
        """Error of the profiler when it failed to start or stop; None if it did not fail."""
        self._profiler = profiler
        self._original = {name: getattr(torch.autograd.profiler, name) for name in START_FUNCTIONS}
        self._switch(profiler.start, "start")
        self.is_running = self.failure is None
        if self.is_running:
            self._annotations = OpenAnnotations()
            for name in START_FUNCTIONS:
                setattr(torch.autograd.profiler, name, partial(self._start_another, name))

    def stop(self) -> None:
        """Stop the profiler if it runs."""
        if not self.is_running:
            return
        self.is_running = False
        for name, start in self._original.items():
            setattr(torch.autograd.profiler, name, start)
        self._annotations.end()
        self._switch(self._profiler.stop, "stop")
        self._annotations.renew()

    def _switch(self, switch: Callable[[], None], verb: str) -> None:
        """Call `switch` and store its error in `failure`; raise if memory ran out, which fails the cell."""
        try:
            switch()
        except Exception as error:  # kineto and its libraries may raise anything
            if exhausted_resource(error).memory is not None:
                raise
            self.failure = f"the profiler did not {verb}: {error}"

    def _start_another(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Stop this profiler, then call the start function that another profiler called."""
        self.stop()
        return self._original[name](*args, **kwargs)


@contextmanager
def exclusive_profiling(profiler: profile) -> Iterator[RunningProfiler]:
    """Run the profiler while the context lasts, if no other profiler runs.

    A profiler that fails to start or stop raises nothing; `failure` of the yielded object has its error.

    Raises:
        ConfigError: Another profiler runs on entry, or was started within the context. Neither is disturbed:
            on entry this profiler does not start; later it stops before the other starts.
    """
    if _is_another_running():
        raise ConfigError(
            "steps cannot be traced while another profiler runs; stop that profiler first, or start it later"
        )
    running = RunningProfiler(profiler)
    try:
        yield running
        was_stopped = not running.is_running and running.failure is None
    finally:
        running.stop()
    if was_stopped:
        raise ConfigError(
            "a profiler was started in a step that was traced; start it before that step or after it"
        )


def _is_another_running() -> bool:
    """Return whether a profiler records or warms up.

    torch has no flag for a profiler that warms up. Such a profiler has been entered and has no results yet. A
    profiler that accumulates the results of several rounds counts too, because its next round may have begun.
    """
    profilers = (item for item in gc.get_objects() if type(item) is torch.autograd.profiler.profile)
    return torch.autograd.profiler._is_profiler_enabled or any(
        profiler.entered and (profiler.kineto_results is None or profiler.acc_events)
        for profiler in profilers
    )
