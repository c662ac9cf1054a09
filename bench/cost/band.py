"""A figure with its error bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class End(StrEnum):
    """Which end of what is not exactly known."""

    LOW = "low"
    EXPECTED = "expected"
    HIGH = "high"


class Corner(NamedTuple):
    """Which end of its time each of three kinds of work takes."""

    compute: End
    links: End
    host: End


@dataclass(frozen=True, slots=True)
class Band:
    """What is expected, and the ends that a real run should lie between."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, value: Callable[[End], float]) -> Band:
        """The least and the most of three values, and the expected one between them."""
        ends = [value(end) for end in End]
        return cls(min(ends), value(End.EXPECTED), max(ends))

    def at(self, end: End) -> float:
        value: float = getattr(self, end.value)
        return value

    def scaled(self, factor: float, widened: float = 1.0) -> Band:
        """All of it times a factor, and its ends so much further off."""
        return Band(self.low * factor / widened, self.expected * factor, self.high * factor * widened)
