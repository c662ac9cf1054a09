"""The modes of a cell (measure, replay, predict), the machine that a mode assumes, and the replayed rank.

A replay runs one rank of a cell and models the time of its communication; a prediction runs no rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.common.environment import Machine
from bench.config import AUTO, Cell, ConfigError, ReplayConfig
from bench.record.record import Provenance, Record
from bench.request import values
from bench.request.choices import Raw, options
from bench.request.hardware import hardware_of_machine, known_hardware
from bench.request.packages import package_refusals
from bench.request.placement import MULTI_NODE_CLUSTERS, node_count
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import NATIVE, is_stack

MEASURE, REPLAY, PREDICT = MODE_NAMES = ("measure", "replay", "predict")
REPLAY_BACKEND = "fake"
"""The process-group backend of a replay: torch's backend for groups in which only one rank exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to produce the record of a cell."""

    provenance: Provenance
    """Provenance of the mode's records."""
    refusals: Callable[[Cell], list[str]]
    """Reasons, each with a way out, why a cell that may be legal in another mode is not legal in this one."""
    starts_ranks: bool = True
    """Whether ranks run; otherwise the record is computed."""
    complete: Callable[[Cell, Record], Record] = lambda _, record: record
    """Function that returns a cell's record with the sections that this mode adds.

    If no ranks run it receives a record with status ok and without sections.
    """


MODES: dict[str, Mode] = {MEASURE: Mode(provenance=Provenance.MEASURED, refusals=package_refusals)}
"""Modes by name. `bench.extras.predict.time_modes.register` adds `replay` and `predict`."""


def mode_of(cell: Cell) -> Mode:
    """Return the mode of a cell; raise ConfigError if MODES does not have it."""
    if cell.mode not in MODES:
        raise ConfigError(
            f"mode={cell.mode}: this mode is registered only by run_sweep.py; elsewhere call"
            " bench.extras.predict.time_modes.register()"
        )
    return MODES[cell.mode]


def starts_ranks(cell: Cell) -> bool:
    """Return whether ranks of the cell run; otherwise its record is computed."""
    return mode_of(cell).starts_ranks


def target_machine(raw: Raw, machine: Machine) -> Machine:
    """Return the machine that a replay or a prediction assumes.

    A prediction, or the plan of a replay, assumes one device of `hardware` per rank, and a replay otherwise
    one copy of this machine's first GPU per rank. With `cluster.world_size=auto` the machine has the number
    of devices of a typical node. Raises ConfigError for an unknown hardware.
    """
    name = raw["hardware"]["name"]
    if raw["mode"] == REPLAY and (name == AUTO or not raw["plan"]):
        return _with_copies_of_first_gpu(machine, raw["cluster"])
    if raw["mode"] == MEASURE or name == AUTO:
        return machine
    facts = known_hardware().get(values.choice("hardware", name, options("hardware")))
    if facts is None:  # a CPU
        return replace(machine, gpus=(), gpu_memory_bytes=(), gpu_error=None)
    count = _ranks_of_node(raw["cluster"], facts)
    gpus = (next(iter(facts["device_names"]), name),) * count
    return replace(machine, gpus=gpus, gpu_memory_bytes=(int(facts["memory_bytes"]),) * count, gpu_error=None)


def _with_copies_of_first_gpu(machine: Machine, cluster: Raw) -> Machine:
    count = _ranks_of_node(cluster, known_hardware().get(hardware_of_machine(machine, "cuda"), {}))
    return replace(
        machine,
        gpus=machine.gpus[:1] * count,
        gpu_memory_bytes=machine.gpu_memory_bytes[:1] * count,
        gpu_capabilities=machine.gpu_capabilities[:1] * count,
    )


def _ranks_of_node(cluster: Raw, facts: Raw) -> int:
    """Return the ranks of one node: requested, or for `auto` the devices of a node by its datasheet."""
    if cluster["world_size"] == "auto":
        return int(facts.get("devices_per_node", 8))
    ranks = values.whole_number("cluster.world_size", cluster["world_size"])
    return math.ceil(ranks / node_count(cluster, cluster["name"]))


def with_replayed_rank(cell: Cell, requested: Any) -> Cell:
    """Return the cell that replays one rank, without traced steps and references; unchanged in other modes.

    The rank is `requested`, or the busiest rank for `auto` and for a cell with one rank. Raises ConfigError
    for a rank that the cell does not have, and for a rank in another mode.
    """
    rank = None if requested == AUTO else values.whole_number("replay.rank", requested, least=0)
    if cell.mode != REPLAY:
        if rank is not None:
            raise ConfigError(f"replay.rank={rank}: belongs to mode=replay; add mode=replay, or leave it out")
        return cell
    ranks = cell.cluster.world_size
    if rank is None or ranks == 1:
        rank = busiest_rank(cell)
    if rank >= ranks:
        raise ConfigError(
            f"replay.rank={rank}: ranks are numbered from 0 to {ranks - 1}; write replay.rank=auto"
        )
    return replace(
        cell,
        replay=ReplayConfig(rank=rank),
        cluster=replace(cell.cluster, backend=REPLAY_BACKEND),
        measure=replace(cell.measure, trace=False, reference_budget_s=0.0),
    )


def busiest_rank(cell: Cell) -> int:
    """Return the rank with the most work in the first sequence group.

    It is rank 0 if all ranks have equal work, and otherwise the last rank, whose queries see the most keys.
    """
    facts = STRATEGIES[cell.strategy]
    with STRATEGIES.name_plugin_in_errors(cell.strategy):
        is_even = cell.layout != "contiguous" or cell.ring_degree == 1 or facts.balances_causal_area(cell)
        return 0 if is_even and not facts.sends_unevenly else cell.sp_degree - 1


def replay_refusals(cell: Cell) -> list[str]:
    """Return the reasons why the cell cannot be replayed, each with a way out."""
    measure, cluster = cell.measure, cell.cluster
    stack = f"trainer={cell.trainer} reads position ids of other ranks; take trainer={NATIVE}"
    shared = f"cluster.ranks_per_gpu={cluster.ranks_per_gpu} needs several ranks; leave it out"
    reasons = (
        (is_stack(cell.trainer), stack),
        (measure.weights, "measure.weights=true needs a trained model; leave it out"),
        (measure.keep_traces, "measure.keep_traces=true needs a traced step; leave it out"),
        (
            cluster.name in MULTI_NODE_CLUSTERS,
            f"cluster={cluster.name} starts ranks on other machines; leave it out",
        ),
        (cluster.ranks_per_gpu > 1, shared),
    )
    return [f"mode=replay runs one rank: {reason}" for applies, reason in reasons if applies]
