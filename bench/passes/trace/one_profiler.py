"""torch has room for one profiler: a second one crashes the process, whoever started it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.autograd.profiler
from torch.profiler import profile

from bench.config import ConfigError

Switching = Callable[[], AbstractContextManager[None]]
STARTS = ("_prepare_profiler", "_enable_profiler")
"""What of torch starts every profiler."""


class _RoomMaker:
    """Starts a profiler, and ends it before anybody else's is started."""

    def __init__(self, profiler: profile, switching: Switching) -> None:
        self.is_on = True
        self._profiler = profiler
        self._switching = switching
        self._plain = {name: getattr(torch.autograd.profiler, name) for name in STARTS}
        with switching():
            profiler.start()
        for name in STARTS:
            setattr(torch.autograd.profiler, name, partial(self._start_another, name))

    def end(self) -> None:
        """End the profiler, once."""
        if not self.is_on:
            return
        self.is_on = False
        for name, start in self._plain.items():
            setattr(torch.autograd.profiler, name, start)
        with self._switching():
            self._profiler.stop()

    def _start_another(self, name: str, *args: Any, **named: Any) -> Any:
        self.end()
        return self._plain[name](*args, **named)


@contextmanager
def tracing(profiler: profile, switching: Switching = nullcontext) -> Iterator[None]:
    """Trace while the context lasts, and only while nobody else does; start and stop within `switching`.

    Raises ConfigError where another profiler is on, which is not touched, and at the end where one was
    started meanwhile, for which this one made room.
    """
    if _is_another_on():
        raise ConfigError(
            "steps cannot be traced while another profiler is on; end it before, or start later"
        )
    room = _RoomMaker(profiler, switching)
    try:
        yield
        made_room = not room.is_on
    finally:
        room.end()
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
