"""Reads the descriptions of hardware from the files in conf/hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "hardware"


def peak_flops_per_s(folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """Return the dense 16-bit peak in FLOP/s by hardware name, where a datasheet states it."""
    return hardware_facts("peak_flops_per_s", folder)


def hardware_facts(key: str, folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """Return one number by hardware name, where the hardware's file has it."""
    return {facts["name"]: float(facts[key]) for facts in _hardware_files(folder) if key in facts}


@cache
def _hardware_files(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the contents of the folder's files. A process reads them only once."""
    return [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(folder.glob("*.yaml"))]


@dataclass(frozen=True, slots=True)
class NodeLink:
    """Link between the devices of one node."""

    name: str
    bytes_per_s: float
    """Bandwidth of one device in one direction."""


def node_links(folder: Path = HARDWARE_FOLDER) -> dict[str, NodeLink]:
    """Return the link within a node by hardware name, where the hardware's file has it."""
    links = {facts["name"]: facts["links"]["node"] for facts in _hardware_files(folder) if "links" in facts}
    return {name: NodeLink(link["name"], float(link["bytes_per_s"])) for name, link in links.items()}


def device_names(folder: Path = HARDWARE_FOLDER) -> dict[str, tuple[str, ...]]:
    """Return the names that NVML reports for the devices of each hardware, by hardware name."""
    return {
        facts["name"]: tuple(facts["device_names"])
        for facts in _hardware_files(folder)
        if "device_names" in facts
    }
