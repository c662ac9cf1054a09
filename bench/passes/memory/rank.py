"""Peak memory of a rank, over its whole life and in steady state."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from bench.passes.memory.peaks import MemoryWatch
from bench.passes.memory.section import RankMemory
from bench.passes.rank_pass import Measurement, RankPass


class MemoryPass(RankPass):
    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.peaks = MemoryWatch(measurement.device, measurement.log.step)

    def around_building(self) -> AbstractContextManager[Any]:
        return self.peaks.life

    def around_first_step(self) -> AbstractContextManager[Any]:
        return self.peaks.life

    def around_window(self) -> AbstractContextManager[Any]:
        return self.peaks.window()

    def around_inspected_step(self) -> AbstractContextManager[Any]:
        return self.peaks.steady

    def part(self) -> RankMemory:
        return self.peaks.read(self.measurement.log.limit_base_bytes)


PASS = MemoryPass
