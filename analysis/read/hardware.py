"""Hardware as its files in conf/ describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "hardware"


def peak_flops_per_s(folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """Dense 16-bit peak per hardware name, FLOP/s, for the hardware whose datasheet is known."""
    return hardware_facts("peak_flops_per_s", folder)


def hardware_facts(key: str, folder: Path = HARDWARE_FOLDER) -> dict[str, float]:
    """One number per hardware name, for the hardware of which it is known."""
    return {each["name"]: float(each[key]) for each in _hardware(folder) if key in each}


@cache
def _hardware(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The contents of the folder's files, read once a process."""
    return [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(folder.glob("*.yaml"))]


@dataclass(frozen=True, slots=True)
class NodeLink:
    """Link between devices of one node."""

    name: str
    bytes_per_s: float
    """Bandwidth of one device in one direction."""


def node_links(folder: Path = HARDWARE_FOLDER) -> dict[str, NodeLink]:
    """Per hardware name the link within a node, for the hardware of which it is known."""
    nodes = {each["name"]: each["links"]["node"] for each in _hardware(folder) if "links" in each}
    return {name: NodeLink(node["name"], float(node["bytes_per_s"])) for name, node in nodes.items()}


def device_names(folder: Path = HARDWARE_FOLDER) -> dict[str, tuple[str, ...]]:
    """Per hardware name what NVML calls such a device."""
    return {each["name"]: tuple(each["device_names"]) for each in _hardware(folder) if "device_names" in each}
