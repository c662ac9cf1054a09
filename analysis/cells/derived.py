"""What a summary's cells say of each other and of their hardware: every column beyond a cell's own."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.cells.capacity import with_capacity
from analysis.cells.comparison import with_speed_up, work_number
from analysis.cells.ideal import with_ideal_attention
from analysis.cells.scaling import with_scaling
from analysis.frame.load import hardware_facts


def with_derived(summary: pd.DataFrame, hardware_bytes: Mapping[str, float] | None = None) -> pd.DataFrame:
    """The summary with speed-ups, scaling, ideal attention and capacities.

    `hardware_bytes` is the memory of one device by hardware name; by default that of conf/hardware.
    """
    known = hardware_facts("memory_bytes") if hardware_bytes is None else hardware_bytes
    whole = summary.copy()  # one block of memory again: many were inserted, and pandas warns of a hundred
    work = work_number(whole)
    compared = with_scaling(with_speed_up(with_capacity(whole, known), work), work)
    return with_ideal_attention(compared, work)
