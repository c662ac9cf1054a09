"""What was picked for the user where the request said `auto`, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.config import AUTO, UNKNOWN_HARDWARE, RunConfig
from bench.environment import Machine
from bench.request.choices import Raw

CHECKPOINTING: Mapping[bool, str] = {
    True: "on for GPU ranks: layers are computed again in backward, so that longer sequences fit",
    False: "off for CPU ranks, which seldom lack memory: computing layers again takes up to a third longer",
}
"""What `checkpointing=auto` became, and why."""


def picked_lines(raws: Sequence[Raw], cells: Sequence[RunConfig], machine: Machine) -> list[str]:
    """One line a choice that somebody may have made otherwise."""
    lines = []
    trains = [cell for cell in cells if cell.workload.name == "train"]
    if trains and any(raw["checkpointing"] == AUTO for raw in raws):
        on_gpus = any(cell.cluster.device == "cuda" for cell in trains)
        lines.append(f"checkpointing=auto: {CHECKPOINTING[on_gpus]}")
    if any(cell.hardware == UNKNOWN_HARDWARE for cell in cells):
        lines.append(
            f"hardware=auto: no file of conf/hardware/ names {machine.device_name}, so there is no MFU; name"
            " one with hardware=..., or add a file"
        )
    return lines
