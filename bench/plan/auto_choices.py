"""The values that `resolve` put in place of `auto`, and notes on them for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from bench.common.environment import Machine
from bench.config import AUTO, NOT_USED, UNKNOWN_HARDWARE, Cell
from bench.plan.planned import PlannedCell
from bench.request import values
from bench.request.choices import Raw
from bench.request.kernel_choice import kernel_choice
from bench.request.modes import REPLAY, starts_ranks
from bench.strategies import STRATEGIES
from bench.strategies.options import default_text
from bench.strategies.stand_in import stand_in_lines
from bench.training.engines import ENGINE_FACTS

CHECKPOINTING: Mapping[bool, str] = {
    True: "on for GPU ranks, so that longer sequences fit; layers are computed again in backward",
    False: "off for CPU ranks, which seldom lack memory; computing layers again takes up to a third longer",
}
"""The value of `checkpointing=auto` in words, with the reason, by whether ranks run on GPUs."""
AUTO_KEYS = (
    "cluster.device", "cluster.world_size", "cluster.threads_per_rank", "hardware.name",
    "model.name", "sp_degree", "ulysses_degree", "dp_shard", "layout", "kernel", "checkpointing", "loss",
    "measure.budget_s", "measure.warmup_s", "measure.min_timed_steps", "measure.reference_budget_s",
    "measure.repeats", "replay.rank", "engine.name", "model.rope_scaling", "model.rope_factor",
)  # fmt: skip
"""The keys whose value may be `auto`."""
IS_MEANINGFUL: Mapping[str, Callable[[Cell], bool]] = {
    "cluster.threads_per_rank": lambda cell: cell.cluster.device == "cpu",
    "ulysses_degree": lambda cell: cell.strategy == "usp",
    "replay.rank": lambda cell: cell.replay.rank is not None,
    "checkpointing": lambda cell: cell.workload.trains,
    "loss": lambda cell: cell.workload.trains,
    "engine.name": lambda cell: cell.workload.trains,
    "model.rope_scaling": lambda cell: cell.model.rope_scaling != NOT_USED,
    "model.rope_factor": lambda cell: cell.model.rope_factor is not None,
}
"""Function that returns whether a key has a meaning in a cell, for each key that has none in some cells."""


def chosen_value(key: str, cell: Cell) -> Any:
    """Return the value of one of AUTO_KEYS in a cell; None if the key has no meaning in it."""
    if key in IS_MEANINGFUL and not IS_MEANINGFUL[key](cell):
        return None
    value = attrgetter("hardware" if key == "hardware.name" else key)(cell)
    return f"{value:g}" if isinstance(value, float) else value


def keys_at_auto(requests: Sequence[Raw]) -> list[str]:
    """Return the keys that are `auto` in any of the requests."""
    return [key for key in AUTO_KEYS if any(_is_auto(request, key) for request in requests)]


def choice_lines(requests: Sequence[Raw], planned: Sequence[PlannedCell], machine: Machine) -> list[str]:
    """Return notes on choices that the user may want to change, with the reasons for them."""
    cells = [*{entry.cell.cell_id: entry.cell for entry in planned}.values()]
    lines = []
    trains = [cell for cell in cells if cell.workload.trains]
    if trains and any(request["checkpointing"] == AUTO for request in requests):
        on_gpus = any(cell.cluster.device == "cuda" for cell in trains)
        lines.append(f"checkpointing=auto: {CHECKPOINTING[on_gpus]}")
    engines = {cell.engine.name for cell in trains if ENGINE_FACTS[cell.engine.name].shards_over_all_ranks}
    replicas = {values.whole_number("dp_replicate", request["dp_replicate"]) for request in requests} - {1}
    if engines and replicas:
        names, counts = ",".join(sorted(engines)), ",".join(map(str, sorted(replicas)))
        lines.append(
            f"engine={names}: dp_replicate={counts} counts as dp_shard, because the engine shards over all"
            " ranks and keeps no replicas"
        )
    if any(cell.hardware == UNKNOWN_HARDWARE for cell in cells):
        lines.append(
            f"hardware=auto: no file of conf/hardware/ names {machine.device_name}, so MFU is unknown; choose"
            " a file with hardware=..., or add one"
        )
    if machine.gpus and any(_is_auto(request, "cluster.world_size") for request in requests):
        lines += _idle_lines(requests, cells, machine)
    if replayed := [p.cell for p in planned if p.reason is None and p.cell.mode == REPLAY]:
        lines.append(_replay_line(replayed))
    rings = [cell for cell in cells if cell.workload.mask == "causal" and cell.ring_degree > 1]
    if len(rings) > 1:
        lines += _balance_lines(rings)
    if any(request["kernel"] == AUTO for request in requests):
        lines += dict.fromkeys(filter(None, (_kernel_line(cell, machine) for cell in cells)))
    used = ((p.cell.strategy, p.cell.kernel) for p in planned if p.reason is None and starts_ranks(p.cell))
    return [*lines, *stand_in_lines(used)]


def _kernel_line(cell: Cell, machine: Machine) -> str | None:
    """Return the note on the kernel that `kernel=auto` chose for a cell; None if another was named."""
    kernel, reason = kernel_choice(cell, machine)
    if cell.kernel == kernel:
        return f"kernel=auto: {kernel}, {reason}"
    if kernel in (STRATEGIES[cell.strategy].kernels or (kernel,)):
        return None
    return f"kernel=auto: {cell.strategy} runs on {cell.kernel}, not like for like with others on {kernel}"


def _replay_line(cells: Sequence[Cell]) -> str:
    """Return the note on the ranks that a replay of these cells runs, and on the limits of a replay."""
    ranks = dict.fromkeys(
        f"{cell.strategy} rank {cell.replay.rank} of {cell.cluster.world_size}" for cell in cells
    )
    return (
        f"mode=replay: one process for each cell ({', '.join(ranks)}) on one {cells[0].hardware}; the time of"
        " communication is modelled, and no loss or other value is checked (docs/replay.md)"
    )


def _balance_lines(rings: Sequence[Cell]) -> list[str]:
    """Return a note if some ring cells split causal work evenly over the ranks and others do not.

    Contiguous shards split it unevenly, unless the strategy balances it itself.
    """
    even = [
        cell
        for cell in rings
        if cell.layout != "contiguous" or STRATEGIES[cell.strategy].balances_causal_area(cell)
    ]
    uneven = [cell for cell in rings if cell not in even]
    if not uneven or not even:
        return []
    uneven_names, even_names = (
        ", ".join(sorted({_balance_name(cell) for cell in group})) for group in (uneven, even)
    )
    line = f"layout: causal work is uneven with {uneven_names} and even with {even_names}"
    return [f"{line}; layout=contiguous makes it uneven for all"]


def _balance_name(cell: Cell) -> str:
    """Return the cell's strategy, with the options and the layout that are not the default."""
    facts = STRATEGIES[cell.strategy]
    options = [
        f"{key}={value}" for key, value in cell.options if value != default_text(facts.options[key], cell)
    ]
    layout = [cell.layout] if cell.layout != facts.default_layout else []
    return " ".join([cell.strategy, *options, *layout])


def _idle_lines(requests: Sequence[Raw], cells: Sequence[Cell], machine: Machine) -> list[str]:
    """Return a note with a way to use all GPUs; no note if the cells use all of them, or none."""
    gpu_count = len(machine.gpus)
    used = {
        -(-cell.cluster.world_size // cell.cluster.ranks_per_gpu)
        for cell in cells
        if cell.cluster.device == "cuda" and starts_ranks(cell) and STRATEGIES[cell.strategy].shares_sequences
    }
    if not used or max(used) >= gpu_count:
        return []
    line = f"cluster.world_size=auto: {max(used)} of {gpu_count} GPUs, the others stay idle"
    if not any(_is_auto(request, "sp_degree") for request in requests):
        return [f"{line}, because the degrees need no more"]
    if any(cell.cluster.ranks_per_gpu > 1 or cell.dp_replicate > 1 for cell in cells):
        return [line]
    divisor = gpu_count & -gpu_count  # the largest power of two that divides it
    ways = [f"sp_degree={divisor} uses all in {gpu_count // divisor} groups"] if divisor > 1 else []
    ways.append(f"cluster.world_size={gpu_count} lets all share a sequence")
    reason = "sp_degree=auto is a power of two, which divides most numbers of heads and lengths"
    return [f"{line}, because {reason}; {', '.join(ways)}"]


def _is_auto(request: Raw, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return ((request.get(section) or {}) if section else request).get(name) == AUTO
