"""One step looked at from inside: what attention was given, what collectives carried, what tensors held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bench.attention.watch import AttentionWatch
from bench.passes.engagement.tap import CommunicationTap
from bench.passes.memory.memory import PeakTracker


class Inspection:
    """Filled by the step that runs while `looking` lasts; costs milliseconds, so never a timed one.

    `watched` lets a watch see the attention of a model while its context lasts.
    """

    def __init__(
        self, watched: Callable[[AttentionWatch], AbstractContextManager[None]], tracker: PeakTracker
    ) -> None:
        self._watched = watched
        self.watch = AttentionWatch()
        self.tap = CommunicationTap(self.watch)
        self.tracker = tracker

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Watch, tap and track everything this rank does."""
        with self.watching(), self.tracker, self.tap:
            yield

    def watching(self) -> AbstractContextManager[None]:
        """Only see attention begin and end: that costs microseconds."""
        return self._watched(self.watch)

    def engagement(self, attention_name: str, modules: Sequence[str]) -> dict[str, Any]:
        """This rank's part of the record's engagement section."""
        return {
            "attention_name": attention_name,
            "modules": list(modules),
            "attention_shapes": sorted(map(list, self.watch.shapes)),
            "sent_bytes": self.tap.sent_bytes(),
            "calls": self.tap.calls_by_kind(),
        }
