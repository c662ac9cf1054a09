"""The machine that a cell is about: a prediction's is described, all others are about the one at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.environment import Machine
from bench.request import values
from bench.request.choices import Raw, options
from bench.request.hardware import calibrated_facts, calibrated_file, known_hardware

PREDICT = "predict"


def target_machine(raw: Raw, machine: Machine) -> Machine:
    """As many devices of the named hardware as the request has ranks; a node of them where that is open.

    Raises ConfigError for an unknown hardware. A prediction for `hardware=auto` is about this machine.
    """
    name = raw["hardware"]["name"]
    if raw["mode"] != PREDICT or name == "auto":
        return machine
    facts = _facts(raw["hardware"])
    if facts is None:
        return replace(machine, gpus=(), gpu_memory_bytes=(), gpu_error=None)
    count = _ranks(raw["cluster"]["world_size"], facts)
    described = (next(iter(facts["device_names"]), name),) * count
    return replace(
        machine, gpus=described, gpu_memory_bytes=(int(facts["memory_bytes"]),) * count, gpu_error=None
    )


def _facts(raw: Raw) -> Raw | None:
    """What is known of the named device; None for a CPU."""
    file = calibrated_file(raw)
    if file is None:
        return known_hardware().get(values.choice("hardware", raw["name"], options("hardware")))
    facts = calibrated_facts(file)
    return facts if facts["device_names"] else None


def _ranks(world_size: Any, facts: Raw) -> int:
    if world_size == "auto":
        return int(facts.get("devices_per_node", 8))
    return values.whole("cluster.world_size", world_size)
