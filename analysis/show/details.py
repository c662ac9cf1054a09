"""Texts of a cell's details on the page, for which the table of cells has no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.cells.comparison import BASE
from analysis.cells.parts import step_ms, waterfall_of
from analysis.labels import SHARED_CORES, count_label, number_label
from analysis.read.metrics import text_of
from bench.config import UNKNOWN_HARDWARE

Cell = Mapping[Any, Any]
NO_PEAK = "unknown: no file of conf/hardware/ names this device"
CHECKPOINTING: Mapping[tuple[bool, str], str] = {
    (True, "cuda"): "on, as by default on GPUs: layers are computed again in backward, so that more fits",
    (False, "cuda"): "off: all activations are kept for backward; on GPUs the default is on",
    (True, "cpu"): "on: layers are computed again in backward; on a CPU the default is off",
    (False, "cpu"): "off, as by default on a CPU: all activations are kept for backward",
}
"""Text for a training cell, by its setting and its kind of device."""


def both_texts(names: Sequence[str], cell: Cell) -> str:
    """Return two metrics, `38.1 % / 61.0 %`, a dash for one that is not known; empty where none is."""
    texts = [text_of(cell, name) for name in names]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""


def mfu_text(cell: Cell) -> str:
    """Return MFU by causal and full FLOPs, or that the peak of the device is not known."""
    is_unknown = cell["hardware"] == UNKNOWN_HARDWARE and bool(text_of(cell, "step_time_ms"))
    return both_texts(("mfu_causal", "mfu_full"), cell) or (NO_PEAK if is_unknown else "")


def speed_up_text(cell: Cell) -> str:
    """Return the speed-up over the fastest `local` cell, and which that is."""
    return _over_base(cell, "speed_up", BASE, "speed_up_base")


def scaling_text(cell: Cell) -> str:
    """Return the speed-up over the fewest ranks, with what that is of the ideal."""
    text = _over_base(cell, "scaling_speed_up", cell["scaling_base_strategy"], "scaling_base")
    caveat = f"; {SHARED_CORES}" if cell["cluster.device"] == "cpu" else ""
    return f"{text}, efficiency {text_of(cell, 'scaling_efficiency')}{caveat}" if text else ""


def _over_base(cell: Cell, column: str, strategy: str, base: str) -> str:
    """Return `1.90 times local on 1 rank (cell 0123456789ab)`."""
    if pd.isna(cell[column]):
        return ""
    ranks = cell[f"{base}_ranks"]
    where = "" if pd.isna(ranks) else f" on {count_label(int(ranks), 'rank')}"
    return f"{text_of(cell, column)} times {strategy}{where} (cell {cell[f'{base}_cell_id']})"


def checkpointing_text(cell: Cell) -> str:
    """Return whether a training cell computes layers again; empty where nothing is trained."""
    if cell["workload"] != "train" or not isinstance(cell["checkpointing"], bool | np.bool_):
        return ""
    return CHECKPOINTING.get((bool(cell["checkpointing"]), str(cell["cluster.device"])), "")


def waterfall_text(cell: Cell) -> str:
    """Return `ideal attention 1.20 ms + packing 0.30 ms + ... = 5.60 ms`, without what took no time."""
    if pd.isna(cell["part_attention_ms"]):
        return ""
    parts = " + ".join(f"{part.label} {number_label(ms)} ms" for part, ms in waterfall_of(cell))
    return f"{parts} = {number_label(step_ms(cell))} ms"
