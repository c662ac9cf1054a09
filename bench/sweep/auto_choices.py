"""What was chosen where the request said `auto`. `--help` says by which rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.cell.run import RUNS
from bench.config import AUTO, UNKNOWN_HARDWARE, RunConfig
from bench.cost.area import causal_area
from bench.cost.newer_kernels import newer_kernel_lines
from bench.environment import Machine
from bench.experiments.implementations import label_of
from bench.request.choices import Raw
from bench.request.hardware import capability_of
from bench.strategies import STRATEGIES

CHECKPOINTING: Mapping[bool, str] = {
    True: "on for GPU ranks: layers are computed again in backward, so that longer sequences fit",
    False: "off for CPU ranks, which seldom lack memory: computing layers again takes up to a third longer",
}
"""What `checkpointing=auto` became, and why."""
CHOICES: Mapping[str, Callable[[RunConfig], Any]] = {
    "cluster.device": lambda cell: cell.cluster.device,
    "cluster.backend": lambda cell: cell.cluster.backend,
    "cluster.world_size": lambda cell: cell.cluster.world_size,
    "cluster.threads_per_rank": lambda cell: (
        cell.cluster.threads_per_rank if cell.cluster.device == "cpu" else None
    ),
    "hardware.name": lambda cell: cell.hardware,
    "model.name": lambda cell: cell.model.name,
    "sp_degree": lambda cell: cell.sp_degree,
    "ulysses_degree": lambda cell: cell.ulysses_degree if cell.strategy == "usp" else None,
    "dp_shard": lambda cell: cell.dp_shard,
    "layout": lambda cell: cell.layout,
    "kernel": lambda cell: cell.kernel,
    "checkpointing": lambda cell: cell.checkpointing if _trains(cell) else None,
    "loss": lambda cell: cell.loss if _trains(cell) else None,
    "measure.budget_s": lambda cell: f"{cell.measure.budget_s:g}",
    "measure.warmup_s": lambda cell: f"{cell.measure.warmup_s:g}",
    "measure.least_steps": lambda cell: cell.measure.least_steps,
    "measure.reference_budget_s": lambda cell: f"{cell.measure.reference_budget_s:g}",
    "measure.repeats": lambda cell: cell.measure.repeats,
}
"""By each key that `auto` may stand for, what it became in a cell; None where the cell has no such choice."""


def choices_left_open(raws: Sequence[Raw]) -> list[str]:
    """The keys that the requests leave at `auto`."""
    return [key for key in CHOICES if any(_is_open(raw, key) for raw in raws)]


def choice_lines(raws: Sequence[Raw], cells: Sequence[RunConfig], machine: Machine) -> list[str]:
    """Choices that a person may want to make otherwise, and why they were made."""
    lines = []
    trains = [cell for cell in cells if _trains(cell)]
    if trains and any(raw["checkpointing"] == AUTO for raw in raws):
        on_gpus = any(cell.cluster.device == "cuda" for cell in trains)
        lines.append(f"checkpointing=auto: {CHECKPOINTING[on_gpus]}")
    if any(cell.hardware == UNKNOWN_HARDWARE for cell in cells):
        lines.append(
            f"hardware=auto: no file of conf/hardware/ names {machine.device_name}, so there is no MFU; name"
            " one with hardware=..., or add a file"
        )
    lines += _idle_lines(raws, cells, machine)
    kernels = {(cell.kernel, capability_of(cell, machine)) for cell in cells}
    return [*lines, *_balance_lines(cells), *newer_kernel_lines(kernels)]


def _balance_lines(cells: Sequence[RunConfig]) -> list[str]:
    """A line where some rings share causal work evenly and contiguous ones do not; none elsewhere."""
    causal = [cell for cell in cells if cell.workload.mask == "causal" and cell.ring_degree > 1]
    uneven = [cell for cell in causal if cell.layout == "contiguous" and not _balances(cell)]
    even = [cell for cell in causal if cell.layout != "contiguous" or _balances(cell)]
    if not uneven or not even:
        return []
    most = max(map(_share_of_last, uneven))
    named, others = (", ".join(sorted({label_of(cell) for cell in each})) for each in (uneven, even))
    ways = ["layout=contiguous for all"]
    if any(cell.strategy == "ringmaster_ring" for cell in uneven):
        ways.append("strategy.rotation=head_tail for ringmaster_ring")
    shares = f"causal work is uneven with {named}, whose last rank has up to {most:.1f} times the mean"
    return [f"layout: {shares}, and even with {others}; alike: {', or '.join(ways)}"]


def _balances(cell: RunConfig) -> bool:
    return STRATEGIES[cell.strategy].balances(cell)


def _share_of_last(cell: RunConfig) -> float:
    """The last rank's causal work over the mean rank's."""
    area = [causal_area(cell, rank) for rank in range(cell.sp_degree)]
    return len(area) * area[-1] / sum(area)


def _idle_lines(raws: Sequence[Raw], cells: Sequence[RunConfig], machine: Machine) -> list[str]:
    """How many GPUs are taken, where their number was left open and some stay idle, and how to take all."""
    there = len(machine.gpus)
    taken = {
        -(-cell.cluster.world_size // cell.cluster.ranks_per_gpu)
        for cell in cells
        if cell.cluster.device == "cuda" and cell.mode in RUNS and STRATEGIES[cell.strategy].shares_sequences
    }
    is_open = any(_is_open(raw, "cluster.world_size") for raw in raws)
    if not is_open or not taken or max(taken) >= there:
        return []
    line = f"cluster.world_size=auto: {max(taken)} of {there} GPUs, the others stay idle"
    if not any(_is_open(raw, "sp_degree") for raw in raws):
        return [f"{line}: that is as many as the degrees take"]
    if any(cell.cluster.ranks_per_gpu > 1 or cell.dp_replicate > 1 for cell in cells):
        return [line]
    dividing = there & -there  # the largest power of two that divides it
    ways = [f"sp_degree={dividing} takes all in {there // dividing} groups"] if dividing > 1 else []
    ways.append(f"cluster.world_size={there} lets all share a sequence")
    return [f"{line}: sp_degree=auto is a power of two, as most heads and lengths are; {', '.join(ways)}"]


def _trains(cell: RunConfig) -> bool:
    return cell.workload.name == "train"


def _is_open(raw: Raw, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return ((raw.get(section) or {}) if section else raw).get(name) == AUTO
