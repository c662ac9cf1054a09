"""What was chosen where the request said `auto`. `--help-all` says by which rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from bench.common.environment import Machine
from bench.config import AUTO, UNKNOWN_HARDWARE, Cell
from bench.cost.newer_kernels import newer_kernel_lines
from bench.plan.planned import PlannedCell
from bench.request.choices import Raw
from bench.request.hardware import capability_of
from bench.request.modes import REPLAY, starts_ranks
from bench.strategies import STRATEGIES
from bench.strategies.options import default_text

CHECKPOINTING: Mapping[bool, str] = {
    True: "on for GPU ranks: layers are computed again in backward, so that longer sequences fit",
    False: "off for CPU ranks, which seldom lack memory: computing layers again takes up to a third longer",
}
"""What `checkpointing=auto` became, and why."""
CHOICES = (
    "cluster.device", "cluster.world_size", "cluster.threads_per_rank", "hardware.name",
    "model.name", "sp_degree", "ulysses_degree", "dp_shard", "layout", "kernel", "checkpointing", "loss",
    "measure.budget_s", "measure.warmup_s", "measure.min_timed_steps", "measure.reference_budget_s",
    "measure.repeats", "replay.rank", "engine.name",
)  # fmt: skip
"""The keys that `auto` may stand for."""
IS_IN: Mapping[str, Callable[[Cell], bool]] = {
    "cluster.threads_per_rank": lambda cell: cell.cluster.device == "cpu",
    "ulysses_degree": lambda cell: cell.strategy == "usp",
    "replay.rank": lambda cell: cell.replay.rank is not None,
    "checkpointing": lambda cell: cell.workload.trains,
    "loss": lambda cell: cell.workload.trains,
    "engine.name": lambda cell: cell.workload.trains,
}
"""Whether a cell has such a choice, where not all have."""


def choice(key: str, cell: Cell) -> Any:
    """What one of CHOICES became in a cell; None where the cell has no such choice."""
    if key in IS_IN and not IS_IN[key](cell):
        return None
    value = attrgetter("hardware" if key == "hardware.name" else key)(cell)
    return f"{value:g}" if isinstance(value, float) else value


def choices_left_open(raws: Sequence[Raw]) -> list[str]:
    """The keys that the requests leave at `auto`."""
    return [key for key in CHOICES if any(_is_open(raw, key) for raw in raws)]


def choice_lines(raws: Sequence[Raw], planned: Sequence[PlannedCell], machine: Machine) -> list[str]:
    """Choices that a person may want to make otherwise, and why they were made."""
    cells = [*{each.cell.cell_id: each.cell for each in planned}.values()]
    lines = []
    trains = [cell for cell in cells if cell.workload.trains]
    if trains and any(raw["checkpointing"] == AUTO for raw in raws):
        on_gpus = any(cell.cluster.device == "cuda" for cell in trains)
        lines.append(f"checkpointing=auto: {CHECKPOINTING[on_gpus]}")
    if any(cell.hardware == UNKNOWN_HARDWARE for cell in cells):
        lines.append(
            f"hardware=auto: no file of conf/hardware/ names {machine.device_name}, so there is no MFU; name"
            " one with hardware=..., or add a file"
        )
    if machine.gpus and any(_is_open(raw, "cluster.world_size") for raw in raws):
        lines += _idle_lines(raws, cells, machine)
    if replayed := [each.cell for each in planned if each.reason is None and each.cell.mode == REPLAY]:
        lines.append(_replay_line(replayed))
    rings = [cell for cell in cells if cell.workload.mask == "causal" and cell.ring_degree > 1]
    if len(rings) > 1:
        lines += _balance_lines(rings)
    kernels = {(cell.kernel, capability_of(cell, machine)) for cell in cells}
    return [*lines, *newer_kernel_lines(kernels)]


def _replay_line(cells: Sequence[Cell]) -> str:
    """Return which ranks a replay of these legal cells runs, and what it does not say."""
    ranks = dict.fromkeys(
        f"{cell.strategy} rank {cell.replay.rank} of {cell.cluster.world_size}" for cell in cells
    )
    return (
        f"mode=replay: one process for each cell ({', '.join(ranks)}) on this machine's first device; the"
        " link is modelled, and no loss or other value is checked (docs/replay.md)"
    )


def _balance_lines(rings: Sequence[Cell]) -> list[str]:
    """Return a line where some rings share causal work evenly and contiguous ones do not; none elsewhere."""
    even = [cell for cell in rings if cell.layout != "contiguous" or STRATEGIES[cell.strategy].balances(cell)]
    uneven = [cell for cell in rings if cell not in even]
    if not uneven or not even:
        return []
    named, others = (", ".join(sorted({_balance_name(cell) for cell in each})) for each in (uneven, even))
    return [
        f"layout: causal work is uneven with {named} and even with {others}; alike: layout=contiguous for all"
    ]


def _balance_name(cell: Cell) -> str:
    """Return the cell's strategy, with its options and layout where they are not the default."""
    facts = STRATEGIES[cell.strategy]
    options = [
        f"{key}={value}" for key, value in cell.options if value != default_text(facts.options[key], cell)
    ]
    layout = [cell.layout] if cell.layout != facts.default_layout else []
    return " ".join([cell.strategy, *options, *layout])


def _idle_lines(raws: Sequence[Raw], cells: Sequence[Cell], machine: Machine) -> list[str]:
    """How many GPUs are taken, where their number was left open and some stay idle, and how to take all."""
    there = len(machine.gpus)
    taken = {
        -(-cell.cluster.world_size // cell.cluster.ranks_per_gpu)
        for cell in cells
        if cell.cluster.device == "cuda" and starts_ranks(cell) and STRATEGIES[cell.strategy].shares_sequences
    }
    if not taken or max(taken) >= there:
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


def _is_open(raw: Raw, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return ((raw.get(section) or {}) if section else raw).get(name) == AUTO
