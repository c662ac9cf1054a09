"""What a cell does over and over, and what of its record only this kind of work has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench.passes.parity.attention import ParityOutcome
from bench.passes.timing.timing import TimedSteps
from bench.ranks.log import StepPhase
from bench.strategies.strategy import Strategy, Wiring


@dataclass(frozen=True, slots=True)
class Rank:
    """What a workload is built on: an installed strategy and this rank's device."""

    strategy: Strategy
    wiring: Wiring
    device: torch.device
    phase: StepPhase


class Workload(ABC):
    """One kind of step; the passes run, time, trace and inspect it without knowing which."""

    own_phase: ClassVar[str]
    """The pass that `sections` is."""
    optimizer: object | None = None
    """What has a method `update`, the optimizer's part of a step; None where nothing is trained."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.cell = rank.strategy.cell

    @abstractmethod
    def step(self, number: int) -> Any:
        """One step at full length, not waited for; what it returns is handed to `sections`."""

    @abstractmethod
    def short_step(self) -> None:
        """The cheapest step that pays for all that happens only once."""

    @abstractmethod
    def checks(self) -> Mapping[str, Callable[[], ParityOutcome]]:
        """The parity checks, by what they check; every rank must run them all."""

    @abstractmethod
    def sections(self, timed: TimedSteps) -> dict[str, Any]:
        """Sections of the record that only this workload has; every rank must call it."""

    def write_gradients(self, folder: Path) -> None:  # noqa: B027  work without parameters has none to write
        """Write every gradient of the first step into the folder."""
