"""What a device and its links can do, as a file of conf/hardware/ says it: peaks, and what is sustained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.command import tool_words
from bench.config import ConfigError
from bench.cost.band import Band, End
from bench.cost.calibration import Calibration


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one device to the others."""

    name: str
    bytes_per_s: float
    """Of one device in one direction."""
    latency_s: float
    """Of one message, or of the first step of a collective."""
    hop_latency_s: float = 0.0
    """Of each further step of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device, of which a node holds some."""

    name: str
    peak_flops_per_s: float
    """Dense, in 16 bits."""
    memory_bytes_per_s: float
    usable_bytes: int
    """What one process may take of a device that is its own."""
    devices_per_node: int
    node: Link
    """To the devices of the same node."""
    network: Link
    """To those of other nodes."""
    matmul: Band
    """Share of the peak that large matrix products sustain."""
    memory: Band
    """Share of the memory's peak that elementwise operations sustain."""
    link: Band
    """Share of a link's rate that large messages sustain."""
    attention_forward: Mapping[str, Band]
    """Share of the peak that a kernel sustains on large blocks, by its name."""
    attention_backward: Mapping[str, Band]
    host_s_per_operation: Band
    """Seconds that Python takes to start one operation."""
    price_per_device_hour: float | None
    """Null until the user gives one."""
    calibration: Calibration | None = None
    """What was measured there, in place of shares of a datasheet."""


CALIBRATED_SUFFIX = ".yaml"
NEEDED = ("links", "rates", "host_s_per_operation", "devices_per_node")
"""What a file must have for a time to be predicted."""


def is_calibrated(name: str) -> bool:
    """Whether a cell's hardware is a file of its own, not one of conf/hardware/."""
    return name.endswith(CALIBRATED_SUFFIX)


def file_of(name: str) -> str:
    """The file that a cell's hardware stands in."""
    return name if is_calibrated(name) else f"conf/hardware/{name}.yaml"


def lacking(facts: Mapping[str, Any]) -> list[str]:
    """What one file's content does not say and a prediction of times needs."""
    return [key for key in NEEDED if key not in facts]


def hardware_from(facts: Mapping[str, Any]) -> Hardware:
    """One file's content as numbers; raises ConfigError where it lacks what a prediction needs."""
    missing = lacking(facts)
    if missing:
        raise ConfigError(
            f"hardware={facts['name']}: its file in conf/hardware/ has no {missing[0]}, without which no time"
            f" can be predicted; measure this machine with `{tool_words('bench.calibrate')} --output"
            " FILE.yaml` and take hardware=calibrated hardware.path=FILE.yaml, or name a device that has a"
            " file, such as hardware=h100_80gb"
        )
    rates = facts["rates"]
    return Hardware(
        name=str(facts["name"]),
        peak_flops_per_s=float(facts["peak_flops_per_s"]),
        memory_bytes_per_s=float(facts["memory_bytes_per_s"]),
        usable_bytes=int(facts["usable_bytes"]),
        devices_per_node=int(facts["devices_per_node"]),
        node=Link(**facts["links"]["node"]),
        network=Link(**facts["links"]["network"]),
        matmul=Band(*rates["matmul"]),
        memory=Band(*rates["memory"]),
        link=Band(*rates["link"]),
        attention_forward={kernel: Band(*share) for kernel, share in rates["attention_forward"].items()},
        attention_backward={kernel: Band(*share) for kernel, share in rates["attention_backward"].items()},
        host_s_per_operation=Band(*facts["host_s_per_operation"]),
        price_per_device_hour=facts.get("price_per_device_hour"),
        calibration=Calibration.of(facts["calibrated"]) if "calibrated" in facts else None,
    )


SLOWEST: Mapping[End, End] = {End.LOW: End.HIGH, End.EXPECTED: End.EXPECTED, End.HIGH: End.LOW}
"""A rate's lowest end makes a time's highest."""
