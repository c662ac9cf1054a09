"""What was picked for the user where the request said `auto`, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.config import AUTO, UNKNOWN_HARDWARE, RunConfig
from bench.environment import Machine
from bench.labels import shown
from bench.request.choices import Raw
from bench.request.hardware import known_hardware
from bench.statistics import MAX_PROCESSES, MIN_PROCESSES

CHECKPOINTING: Mapping[bool, str] = {
    True: "on for GPU ranks: layers are computed again in backward, so that longer sequences fit",
    False: "off for CPU ranks, which seldom lack memory: computing layers again takes up to a third longer",
}
"""What `checkpointing=auto` became, and why."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One choice that may be left at `auto`."""

    key: str
    value: Callable[[RunConfig], Any]
    why: Callable[[RunConfig, Machine], str]
    """Of one of the cells; the reason is the same for all."""
    concerns: Callable[[RunConfig], bool] = lambda _: True
    """The cells that have this choice at all."""


def _trains(cell: RunConfig) -> bool:
    return cell.workload.name == "train"


def _devices(cell: RunConfig, machine: Machine) -> str:
    if cell.cluster.device == "cpu":
        return "no GPU is visible here" if not machine.gpus else "the CPU was asked for"
    return f"{len(machine.gpus)} visible here" if machine.gpus else "as the hardware has them"


def _ranks(cell: RunConfig, machine: Machine) -> str:  # noqa: ARG001
    if cell.cluster.device == "cpu":
        return "two CPU ranks show that a strategy works; local has one"
    return "one for each GPU; local has one"


def _hardware(cell: RunConfig, machine: Machine) -> str:
    if cell.hardware == UNKNOWN_HARDWARE:
        return (
            f"no file of conf/hardware/ names {machine.device_name}, so there is no MFU; name one with"
            " hardware=..., or add a file"
        )
    if cell.hardware == "cpu":
        return f"{machine.cpu}; no datasheet says what a CPU sustains"
    names = known_hardware().get(cell.hardware, {}).get("device_names", ())
    if machine.device_name not in names:
        return "the experiment's choice"
    return f"the file of conf/hardware/ that names {machine.device_name}"


def _window(what: str) -> Callable[[RunConfig, Machine], str]:
    return lambda cell, _: f"{what} on {'a GPU' if cell.cluster.device == 'cuda' else 'a CPU'}"


PICKS: Sequence[Pick] = (
    Pick("cluster.device", lambda cell: cell.cluster.device, _devices),
    Pick("cluster.backend", lambda cell: cell.cluster.backend, lambda *_: "the library of that device"),
    Pick("cluster.world_size", lambda cell: cell.cluster.world_size, _ranks),
    Pick(
        "cluster.threads_per_rank",
        lambda cell: cell.cluster.threads_per_rank,
        lambda _, machine: f"{machine.cores} cores, shared by the ranks",
    ),
    Pick(
        "hardware.name",
        lambda cell: cell.hardware,
        _hardware,
    ),
    Pick(
        "model.name",
        lambda cell: cell.model.name,
        lambda *_: "qwen3_nano on a CPU, qwen3_0_6b on one to three GPUs, qwen3_4b from four",
    ),
    Pick("sp_degree", lambda cell: cell.sp_degree, lambda *_: "all ranks that the data-parallel axes leave"),
    Pick(
        "ulysses_degree",
        lambda cell: cell.ulysses_degree,
        lambda *_: "the most ranks that split the KV heads without repeating one; the rest is the ring",
        lambda cell: cell.strategy == "usp",
    ),
    Pick(
        "dp_shard", lambda cell: cell.dp_shard, lambda *_: "the ranks that sp_degree and dp_replicate leave"
    ),
    Pick("layout", lambda cell: cell.layout, lambda *_: "each strategy's own default"),
    Pick("kernel", lambda cell: cell.kernel, lambda *_: "in torch, on every device"),
    Pick(
        "checkpointing",
        lambda cell: shown(cell.checkpointing),
        lambda cell, _: CHECKPOINTING[cell.cluster.device == "cuda"],
        _trains,
    ),
    Pick(
        "loss",
        lambda cell: cell.loss,
        lambda *_: "chunked where the loop is ours, untiled in a training stack",
        _trains,
    ),
    Pick("measure.budget_s", lambda cell: f"{cell.measure.budget_s:g}", _window("seconds of timed steps")),
    Pick("measure.warmup_s", lambda cell: f"{cell.measure.warmup_s:g}", _window("seconds of warm-up")),
    Pick("measure.least_steps", lambda cell: cell.measure.least_steps, _window("whatever the budget,")),
    Pick(
        "measure.repeats",
        lambda cell: cell.measure.repeats,
        lambda cell, _: (
            f"one process a cell, then {MIN_PROCESSES} to {MAX_PROCESSES} at lengths where the sweep fits"
            f" measure.repeats_budget_s={cell.measure.repeats_budget_s:g}"
            if cell.measure.repeats == AUTO
            else "one process a cell on a CPU, whose results do not rank strategies"
        ),
    ),
)
"""Every key that `auto` may stand for, in the order in which a plan tells them."""


def picked_lines(raws: Sequence[Raw], cells: Sequence[RunConfig], machine: Machine) -> list[str]:
    """One line a choice that somebody may have made otherwise."""
    lines = []
    trains = [cell for cell in cells if cell.workload.name == "train"]
    if trains and any(raw["checkpointing"] == AUTO for raw in raws):
        on_gpus = any(cell.cluster.device == "cuda" for cell in trains)
        lines.append(f"checkpointing=auto: {CHECKPOINTING[on_gpus]}")
    unknown = [cell for cell in cells if cell.hardware == UNKNOWN_HARDWARE]
    return [*lines, *(f"hardware=auto: {_hardware(cell, machine)}" for cell in unknown[:1])]


def all_picks(raws: Sequence[Raw], cells: Sequence[RunConfig], machine: Machine) -> list[tuple[str, str]]:
    """Every choice that the request left at `auto`: the key with what it became, and why."""
    found = []
    for pick in PICKS:
        its = [cell for cell in cells if pick.concerns(cell)]
        if its and any(_is_open(raw, pick.key) for raw in raws):
            values = _by_strategy(its, pick.value)
            found.append((f"{pick.key.removesuffix('.name')}={values}", pick.why(its[0], machine)))
    return found


def placed_line(cell: RunConfig) -> str:
    """`ring: 2 x cpu over gloo, 1 thread each, qwen3_nano, zero3, bf16`."""
    cluster = cell.cluster
    shared = ", ranks share GPUs: correctness only" if cluster.ranks_per_gpu > 1 else ""
    threads = "1 thread" if cluster.threads_per_rank == 1 else f"{cluster.threads_per_rank} threads"
    return (
        f"{cell.strategy}: {cluster.world_size} x {cluster.device} over {cluster.backend}{shared},"
        f" {threads} each, {cell.model.name}, {cell.engine}, {cell.dtype}"
    )


def _is_open(raw: Raw, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return ((raw.get(section) or {}) if section else raw).get(name) == AUTO


def _by_strategy(cells: Sequence[RunConfig], value: Callable[[RunConfig], Any]) -> str:
    """`zigzag`, or `zigzag (ring), contiguous (local, ulysses)` where strategies differ.

    `1, 2 (by cell)` where one strategy has several, as an experiment's cells may.
    """
    owners: dict[str, dict[str, None]] = {}
    for cell in cells:
        owners.setdefault(str(value(cell)), {})[cell.strategy] = None
    if len(owners) == 1:
        return next(iter(owners))
    if sum(map(len, owners.values())) > len({cell.strategy for cell in cells}):
        return f"{', '.join(owners)} (by cell)"
    return ", ".join(f"{each} ({', '.join(names)})" for each, names in owners.items())
