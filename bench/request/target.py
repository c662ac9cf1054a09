"""The machine that a cell is about: described for a prediction, made of copies of one device for a replay."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.common.environment import Machine
from bench.request import values
from bench.request.choices import Raw, options
from bench.request.hardware import known_hardware, this_hardware

PREDICT, REPLAY = "predict", "replay"
MODE_NAMES = ("measure", REPLAY, PREDICT)


def target_machine(raw: Raw, machine: Machine) -> Machine:
    """As many devices of the named hardware as the request has ranks; a node of them where that is open.

    A replay is about as many copies of this machine's first GPU. Raises ConfigError for an unknown hardware.
    A prediction for `hardware=auto` is about this machine.
    """
    name = raw["hardware"]["name"]
    if raw["mode"] == REPLAY:
        return _with_copies_of_first_gpu(machine, raw["cluster"])
    if raw["mode"] != PREDICT or name == "auto":
        return machine
    facts = known_hardware().get(values.choice("hardware", name, options("hardware")))
    if facts is None:  # a CPU
        return replace(machine, gpus=(), gpu_memory_bytes=(), gpu_error=None)
    count = _ranks_of_node(raw["cluster"], facts)
    described = (next(iter(facts["device_names"]), name),) * count
    return replace(
        machine, gpus=described, gpu_memory_bytes=(int(facts["memory_bytes"]),) * count, gpu_error=None
    )


def _with_copies_of_first_gpu(machine: Machine, cluster: Raw) -> Machine:
    count = _ranks_of_node(cluster, known_hardware().get(this_hardware(machine, "cuda"), {}))
    return replace(
        machine,
        gpus=machine.gpus[:1] * count,
        gpu_memory_bytes=machine.gpu_memory_bytes[:1] * count,
        gpu_capabilities=machine.gpu_capabilities[:1] * count,
    )


def _ranks_of_node(cluster: Raw, facts: Raw) -> int:
    if cluster["world_size"] == "auto":
        return int(facts.get("devices_per_node", 8))
    ranks = values.whole("cluster.world_size", cluster["world_size"])
    nodes = cluster["nodes"] if isinstance(cluster["nodes"], int) else 1
    return math.ceil(ranks / max(1, nodes))
