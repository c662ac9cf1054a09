"""Advises what to do about cells without a result and about comparisons that are undecided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.cells.cells import Cells
from analysis.labels import status_label
from analysis.read.archive import Archive
from bench.common.command import is_sweep, resume_command
from bench.common.statistics import MIN_PROCESSES
from bench.measure.quality.section import EXPERIMENT as QUALITY
from bench.record.record import Status

Config = Mapping[str, Any]
"""Settings of a record, by their names on the command line."""

MAX_LENGTH_EXPERIMENT = "max_length"
RUN_ONCE = (MAX_LENGTH_EXPERIMENT, QUALITY)
"""Experiments whose cells run once and refuse repeats."""
LOGS = "cells/<cell>-<repeat>/rank_<rank>.log"
"""Log of a rank, relative to the sweep's folder."""
NEXT_STEPS: Mapping[Status, str] = {
    Status.UNSUPPORTED: "change the request as the reason says; the other cells are not affected",
    Status.WRONG_RESULT: (
        "the result is wrong, so no speed is reported; choose a layout, kernel or dtype that passes, and"
        " report the failure to the authors of the code"
    ),
    Status.OUT_OF_MEMORY: "the length at which memory runs out is itself a result; to fit more, try",
    Status.TIMED_OUT: (
        f"raise measure.timeout_s if the cell was only slow; each rank's stack is at the end of {LOGS}"
    ),
    Status.KILLED: (
        "read in dmesg whether the kernel killed the process because memory ran out; run fewer processes at"
        " the same time; after the loss of a node, see why it was lost and resume the sweep"
    ),
    Status.CRASHED: f"read the stack at the end of {LOGS}; run the cell again to see if it always crashes",
    Status.ERROR: f"read the traceback in {LOGS}",
    Status.INTERRUPTED: "run the cell again",
}
"""Advice for every status but `ok`. After out of memory follow items of WAYS_TO_FIT."""
NEXT_STEPS_OF_LOOPS: Mapping[Status, str] = {
    Status.UNSUPPORTED: "change the script, or how it is observed, as the reason says",
    Status.WRONG_RESULT: "the result is wrong, so no speed is reported; fix the loop as the reason says",
    Status.OUT_OF_MEMORY: (
        "the length at which memory runs out is itself a result; to fit more, share a sequence among more"
        " ranks, checkpoint activations, or take smaller batches or shorter sequences"
    ),
    Status.ERROR: "read the rank and the error in the reason, and the traceback in the script's own output",
}
"""Advice for observed loops, which no key of ours changes and whose logs are not in the sweep's folder."""
WAYS_TO_FIT_SETTINGS = (
    "strategy", "batch", "workload", "checkpointing", "loss", "model.num_layers", "cluster.memory_limit_gib",
)  # fmt: skip
"""Settings that decide which ways to save memory are still open to a cell."""
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
"""Ways to save memory, each with a function that says whether a cell has not tried it yet."""


def next_steps(cells: Cells) -> list[str]:
    """Return `Next step after OOM: ...` for every status of cells, in the order of NEXT_STEPS."""
    of_sweeps = cells.frame[~cells.are_observed]
    observed_statuses = {*cells.frame.loc[cells.are_observed, "status"]}
    lines = []
    for status in NEXT_STEPS:
        settings = of_sweeps.loc[of_sweeps["status"] == status, [*WAYS_TO_FIT_SETTINGS]].drop_duplicates()
        if len(settings):
            configs = settings.astype("object").where(settings.notna(), None).to_dict("records")
            advice = next_step(status, [{str(key): config[key] for key in config} for config in configs])
            lines.append(f"Next step after {status_label(status)}: {advice}")
        if status in observed_statuses:
            advice = NEXT_STEPS_OF_LOOPS.get(status, NEXT_STEPS[status])
            lines.append(f"Next step after {status_label(status)} in an observed loop: {advice}")
    return lines


def next_step(status: Status, configs: Iterable[Config]) -> str:
    """Return the advice for all cells that ended with a status; `configs` are the cells' settings."""
    if status is not Status.OUT_OF_MEMORY:
        return NEXT_STEPS[status]
    cells = [*configs]
    ways = [way for way, is_open in WAYS_TO_FIT if any(map(is_open, cells))]
    return f"{NEXT_STEPS[status]} {', '.join(ways)}"


def _number(config: Config, key: str) -> float:
    """Return a number of a configuration; 0 where it has none."""
    return float(config.get(key) or 0)


def deciding_command(archive: Archive) -> Callable[[str], str] | None:
    """Return a function from one more option to the command that continues the sweep with it.

    None where the records come from several folders or commands, or from no sweep, so that no one command can
    continue them, and for experiments whose cells run once because no speeds are compared.
    """
    folders = {path.parent for path, _ in archive.places}
    command_lines = {tuple(environment.argv or [""]) for environment in archive.environments}
    if len(folders) != 1 or archive.frame["experiment"].isin(RUN_ONCE).any():
        return None
    (folder,) = folders
    if not all(is_sweep(words[0]) for words in command_lines):
        return None
    repeats = (f"measure.repeats={MIN_PROCESSES}", "measure.repeats_budget_s=0")
    commands = {resume_command(words, folder, *repeats): words for words in command_lines}
    if len(commands) != 1:
        return None
    (words,) = commands.values()
    return lambda word: resume_command(words, folder, word)
