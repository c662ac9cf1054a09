"""A step's parts at the corners of what is not known, so that strategies are compared at equal rates.

Most of what is uncertain of two strategies is the same: one kernel, one link, one host. Their own bands
overlap nearly always; what differs between them is seen where both are predicted at the same corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from bench.config import RunConfig
from bench.cost.band import End
from bench.cost.calibrated_speeds import speeds_of
from bench.cost.hardware import Hardware
from bench.cost.speeds import MixedSpeeds
from bench.cost.time import StepParts, step_parts
from bench.cost.work import StepWork


class Corner(NamedTuple):
    """Which end of its time each of three kinds of work takes."""

    compute: End
    links: End
    host: End


EXPECTED = Corner(End.EXPECTED, End.EXPECTED, End.EXPECTED)
CORNERS: Sequence[Corner] = (
    EXPECTED,
    *(Corner(*ends) for ends in product((End.LOW, End.HIGH), repeat=len(EXPECTED))),
)


def parts_at_corners(cell: RunConfig, work: StepWork, hardware: Hardware) -> tuple[StepParts, ...]:
    """One step at each of CORNERS, the expected one first."""
    speeds = {end: speeds_of(hardware, end) for end in End}
    return tuple(step_parts(cell, work, MixedSpeeds(*(speeds[end] for end in corner))) for corner in CORNERS)
