"""What the rank's device and the machine did while the clock ran."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from bench.passes.rank_pass import RankPass, Steps
from bench.passes.telemetry.section import RankTelemetry
from bench.passes.telemetry.telemetry import PERIOD_S, Telemetry, open_nvml


class TelemetryPass(RankPass):
    telemetry: Telemetry | None = None
    found: RankTelemetry | None = None

    def around_window(self) -> AbstractContextManager[Any]:
        if self.telemetry is None:
            subject = self.measurement.subject
            device = open_nvml(subject.device, ranks_beside=subject.ranks_beside)
            # All ranks of a node together ask the driver as often as one alone would.
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.telemetry = Telemetry(device, PERIOD_S * ranks)
        return self.telemetry.window()

    def run(self) -> Steps:
        """Reads at once what the window showed: other processes may come and go while traces are read."""
        self.found = None if self.telemetry is None else self.telemetry.read()
        yield from ()

    def part(self) -> RankTelemetry | None:
        return self.found


PASS = TelemetryPass
