"""One step looked at from inside: what attention was given, what collectives carried, what tensors held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.attention.boundary import AttentionWatch
from bench.attention.strategy import Strategy
from bench.measure.memory import PeakTracker
from bench.measure.tap import CommunicationTap


class Inspection:
    """Filled by the step that runs while `looking` lasts; costs milliseconds, so never a timed one."""

    def __init__(self, strategy: Strategy, tracker: PeakTracker) -> None:
        self.strategy = strategy
        self.watch = AttentionWatch()
        self.tap = CommunicationTap(self.watch)
        self.tracker = tracker

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Watch, tap and track everything this rank does."""
        with self.watching(), self.tracker, self.tap:
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Only see attention begin and end: that costs microseconds."""
        self.strategy.watch = self.watch
        try:
            yield
        finally:
            self.strategy.watch = None
