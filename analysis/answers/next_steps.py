"""Advice: what to do about cells without a result, a line per status, and which kernels are likely faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.cells.cells import Cells
from analysis.labels import status_label
from analysis.read.archive import Archive
from analysis.read.hardware import hardware_facts
from bench.common.command import again_command, is_sweep
from bench.common.statistics import MIN_PROCESSES
from bench.cost.newer_kernels import newer_kernel_lines
from bench.record.record import Status

Config = Mapping[str, Any]
"""A record's `config`: the command line's names."""

MAX_LENGTH = "max_length"
"""The experiment in which each length runs once."""
LOGS = "cells/<cell>-<repeat>/rank_<rank>.log"
"""Where ranks write, in a sweep's folder."""
NEXT_STEPS: Mapping[Status, str] = {
    Status.UNSUPPORTED: "the reason says what to change; the other cells are not affected",
    Status.WRONG_RESULT: (
        "its result is wrong, so it has no speed; choose a layout, kernel or dtype that passes, and report it"
        " to the authors of the code"
    ),
    Status.OUT_OF_MEMORY: "where it no longer fits is a result; to fit more, try",
    Status.TIMED_OUT: f"raise measure.timeout_s if it was only slow; a rank's stack is at the end of {LOGS}",
    Status.KILLED: "dmesg says whether the kernel did it because memory ran out; run less beside it",
    Status.CRASHED: f"the stack is at the end of {LOGS}; run it again to see whether it happens always",
    Status.ERROR: f"the traceback is in {LOGS}",
    Status.INTERRUPTED: "run it again",
}
"""For every status but `ok`; after out of memory, the ways that the cells have not tried follow."""
OF_OBSERVED: Mapping[Status, str] = {
    Status.UNSUPPORTED: "the reason says what to change in the script or in how it is observed",
    Status.WRONG_RESULT: "its result is wrong, so it has no speed; the reason says what to fix in the loop",
    Status.OUT_OF_MEMORY: (
        "where it no longer fits is a result; to fit more, share a sequence among more ranks, checkpoint"
        " activations, or take smaller batches or shorter sequences"
    ),
    Status.ERROR: "the reason names the rank and the error; the script's own output has the traceback",
}
"""Advice for observed loops: no key of ours changes them, and no folder of ours has their logs."""
WAYS_TO_FIT_READ = (
    "strategy", "batch", "workload", "checkpointing", "loss", "model.num_layers", "cluster.memory_limit_gib",
)  # fmt: skip
"""The settings that decide which ways are open."""
WAYS_TO_FIT: Sequence[tuple[str, Callable[[Config], bool]]] = (
    ("strategy=ulysses or ring", lambda config: config.get("strategy") == "local"),
    ("a higher sp_degree", lambda config: config.get("strategy") != "local"),
    ("batch=1", lambda config: _number(config, "batch") > 1),
    (
        "checkpointing=true",
        lambda config: (
            config.get("workload") == "train"
            and config.get("checkpointing") is False
            and _number(config, "model.num_layers") > 1
        ),
    ),
    ("loss=chunked", lambda config: config.get("workload") == "train" and config.get("loss") == "untiled"),
    ("a higher cluster.memory_limit_gib", lambda config: _number(config, "cluster.memory_limit_gib") > 0),
    ("a shorter seq_len", lambda _: True),
)
"""What takes less memory, and which cells do not do it yet."""


def next_steps(cells: Cells) -> list[str]:
    """`What to do, OOM: ...` for every status that cells ended with, in the table's order."""
    own, lines = cells.frame[~cells.are_observed], []
    observed = {*cells.frame.loc[cells.are_observed, "status"]}
    for status in NEXT_STEPS:
        failed = own.loc[own["status"] == status, [*WAYS_TO_FIT_READ]].drop_duplicates()
        if len(failed):
            configs = failed.astype("object").where(failed.notna(), None).to_dict("records")
            found = next_step(status, [{str(key): each[key] for key in each} for each in configs])
            lines.append(f"What to do, {status_label(status)}: {found}")
        if status in observed:
            found = OF_OBSERVED.get(status, NEXT_STEPS[status])
            lines.append(f"What to do, {status_label(status)} in an observed loop: {found}")
    return lines


def next_step(status: Status, configs: Iterable[Config]) -> str:
    """One line for all cells that ended so; `configs` are theirs."""
    if status is not Status.OUT_OF_MEMORY:
        return NEXT_STEPS[status]
    cells = [*configs]
    ways = [way for way, is_open in WAYS_TO_FIT if any(map(is_open, cells))]
    return f"{NEXT_STEPS[status]} {', '.join(ways)}"


def _number(config: Config, key: str) -> float:
    """A figure of a configuration; 0 where it has none."""
    return float(config.get(key) or 0)


def deciding_command(archive: Archive) -> Callable[[str], str] | None:
    """Return what makes the command that goes on with a sweep with a word; None for several commands.

    None also for `experiment=max_length`, where each length runs once and no speed is compared.
    """
    folders = {path.parent for path, _ in archive.places}
    given = {tuple(environment.argv or [""]) for environment in archive.environments}
    if len(folders) != 1 or archive.frame["experiment"].eq(MAX_LENGTH).any():
        return None
    (folder,) = folders
    if not all(is_sweep(words[0]) for words in given):
        return None
    repeats = (f"measure.repeats={MIN_PROCESSES}", "measure.repeats_budget_s=0")
    commands = {again_command(words, folder, *repeats): words for words in given}
    if len(commands) != 1:
        return None
    (words,) = commands.values()
    return lambda word: again_command(words, folder, word)


def kernel_lines(archive: Archive) -> list[str]:
    """Name likely faster kernels, a line each.

    A GPU that no hardware file describes is as new as the records' environment says.
    """
    known = hardware_facts("compute_capability")
    told = [float(each) for found in archive.environments for each in found.gpu_capabilities]
    on_gpus = archive.frame[archive.frame["cluster.device"].eq("cuda")]
    pairs = on_gpus[["kernel", "hardware"]].drop_duplicates().itertuples(index=False)
    return newer_kernel_lines(
        {(str(kernel), known.get(str(name), max(told, default=None))) for kernel, name in pairs}
    )
