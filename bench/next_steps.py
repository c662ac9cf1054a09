"""What to do next: after each status that is not `ok`, and after a sweep that did not get through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.record import Status

Config = Mapping[str, Any]
"""A record's `config`: the command line's names."""

LOGS = "cells/<cell>-<repeat>/rank_<rank>.log"
"""Where ranks write, in a sweep's folder."""
NEXT_STEPS: Mapping[Status, str] = {
    Status.UNSUPPORTED: "the reason names the way out; the other cells stand as they are",
    Status.WRONG_RESULT: (
        "it computes something else, so it has no speed; find a layout, kernel or dtype that passes, and tell"
        " whose code it is"
    ),
    Status.OUT_OF_MEMORY: "where it no longer fits is a result; to fit more, try",
    Status.TIMED_OUT: f"raise measure.timeout_s if it was only slow; where each rank stood ends {LOGS}",
    Status.KILLED: "dmesg says if the kernel did it for want of memory; run fewer things beside it",
    Status.CRASHED: f"the stack ends {LOGS}; run it again to tell a bug from an accident",
    Status.ERROR: f"the traceback is in {LOGS}",
    Status.INTERRUPTED: "run it again",
}
"""Of every status but `ok`; out of memory goes on with what the cells have not tried."""
WAYS_TO_FIT_READ = (
    "strategy", "batch", "workload", "checkpointing", "loss", "model.num_layers", "cluster.memory_limit_gib",
)  # fmt: skip
"""What of a configuration decides which ways are open."""
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
"""What takes less memory, and in which cells it was not done yet."""


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
