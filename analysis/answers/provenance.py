"""Sentences about how records came to be: by which code, in a replay, from a loop, or by prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain

import pandas as pd

from analysis.answers.wording import names_at_lengths
from analysis.cells.cells import Cells
from analysis.cells.prediction_errors import (
    FIT_OUTCOME,
    PEAK,
    RIGHT,
    STEP_TIME,
    STEP_TIME_IN_BAND,
    UNDECIDED,
    WRONG,
    YES,
)
from analysis.cells.statuses import NO_SPARE, SPARE_BYTES, shown_statuses
from analysis.labels import count_label, percent_label
from analysis.read.archive import MADE_WITH, Archive, origins
from analysis.read.checks import BETWEEN_NAMES
from bench.common.command import sweep_words
from bench.common.labels import length_label, size_label
from bench.config import NOT_USED
from bench.record.record import Status

APART = "code", "torch"
"""Origins of MADE_WITH that a reader sees nowhere else; every figure names its device."""
REPLAY_NOTE = (
    "Replayed: one rank of each cell ran. Its kernels, memory and host work are measured. The data that it"
    " received are copies of its own, and communication took no time. The link is modelled: a rate goes from"
    " all of the link's time exposed to none of it."
)
REPEATED_SETTINGS = ("model", "layout", "kernel", "dtype", "engine")
"""Settings that the command repeats where all cells have the same."""
NO_LINK_RATES = "The rates of the link are not known here, so these rates are upper bounds."


def origin_lines(archive: Archive, frame: pd.DataFrame, mixed: Collection[str]) -> list[str]:
    """Return what is kept apart, put together on request, and left out; empty for a plain sweep.

    `frame` is the archive's before it was mixed.
    """
    several = {kind: origins(frame, kind) for kind in MADE_WITH}
    apart = [
        f"{len(values)} values of {kind} ({', '.join(values)})"
        for kind, values in several.items()
        if kind in APART and kind not in mixed and len(values) > 1
    ]
    together = [f"{kind} {' and '.join(several[kind])}" for kind in mixed if len(several[kind]) > 1]
    lines = []
    if apart:
        lines.append(
            f"The records were made with {' and '.join(apart)}: no series and no speed-up holds two of them;"
            " analysis.report --mix puts them together."
        )
    if together:
        lines.append(f"Put together by --mix: {'; '.join(together)}.")
    if archive.left_out:
        why = ", ".join(f"{count:,} {reason}" for reason, count in archive.left_out.items())
        total = sum(archive.left_out.values())
        lines.append(f"Left out: {count_label(total, 'earlier record')} of cells that ran again ({why}).")
    return lines


def observed_lines(cells: Cells) -> list[str]:
    """Return `Of ring at 8k checked: tokens; not checked: objective (why).` for observed loops."""
    rows = cells.frame[cells.are_observed & cells.frame["status"].eq(Status.OK)]
    found: dict[str, list[str]] = {}
    for row, seq_len, checks in rows[["seq_len", "checks_of_loop"]].dropna().itertuples():
        found.setdefault(checks, []).append(f"{cells.names[row]} at {length_label(int(seq_len))}")
    return [f"Of {', '.join(names)} {checks}." for checks, names in found.items()]


def unchecked_lines(summary: pd.DataFrame) -> list[str]:
    """Return one sentence each: for steps, for checks that were not made, for records that do not say."""
    done = summary.loc[summary["status"] == "ok", ["checks", "checks_missing", "steps", "steps_compared"]]
    known = done[done["checks"].notna()]
    steps, compared = int(known["steps"].sum()), int(known["steps_compared"].sum())
    names = chain.from_iterable(text.split(BETWEEN_NAMES) for text in known["checks_missing"].dropna())
    cells = count_label(len(known), "cell")
    missing = [f"{what} in {count:,} of {cells}" for what, count in Counter(names).items()]
    lines = []
    if steps > compared:
        lines.append(
            f"Losses of {steps - compared:,} of {steps:,} steps are not compared with another cell's."
        )
    if missing:
        lines.append(f"Not checked: {'; '.join(missing)}.")
    if len(known) < len(done):
        of_cells = f"{len(done) - len(known):,} of {count_label(len(done), 'cell')}"
        lines.append(f"The records of {of_cells} do not say what was checked.")
    return lines


def replay_lines(cells: Cells) -> list[str]:
    """Return sentences on what was measured, what is modelled and which real cells vouch for results."""
    if not (cells.are_replayed & cells.frame["status"].ne(Status.UNSUPPORTED)).any():
        return []
    lines = [REPLAY_NOTE]
    ok = cells.frame[cells.are_replayed & cells.frame["status"].eq(Status.OK)]
    if ok["link_ms"].isna().any():
        lines.append(NO_LINK_RATES)
    tight = shown_statuses(cells.frame).eq(NO_SPARE)
    if tight.any():
        spare = size_label(SPARE_BYTES)
        left = f"left less than {spare} free, and NCCL may need as much"
        lines.append(f"Undecided: {names_at_lengths(cells, tight)} {left}.")
    sharing = ok[ok["sp_degree"].gt(1)]
    if len(sharing):
        unchecked = "Not checked in a replay: losses, gradients, attention's values"
        lines.append(f"{unchecked}. To check: {_check_command(sharing)}")
    return lines


def _check_command(sharing: pd.DataFrame) -> str:
    """Return the command that runs real ranks at a short length, in the smallest group of the cells."""
    ranks = int(sharing["sp_degree"].min())
    cells = sharing[sharing["sp_degree"].eq(ranks)]
    on_gpu = cells["cluster.device"].eq("cuda").all()
    same = [key for key in REPEATED_SETTINGS if {*cells[key]} == {cells[key].iloc[0]} - {NOT_USED}]
    words = [
        f"strategy={','.join(sorted({*cells['strategy']}))}",
        f"cluster.world_size={ranks}",
        *([f"cluster.ranks_per_gpu={ranks}"] if on_gpu else []),
        *(f"{key}={cells[key].iloc[0]}" for key in same),
    ]
    return f"{sweep_words()} -m seq_len=1k model.num_layers=1 {' '.join(words)}"


def prediction_lines(cells: Cells) -> list[str]:
    """Return a sentence about all cells that have both; none where no cell has."""
    found = []
    for name, column in {"step time": STEP_TIME, "peak allocated": PEAK}.items():
        errors = cells.frame[column].dropna().abs()
        if len(errors):
            median, most = percent_label(errors.median()), percent_label(errors.max())
            cells_of = count_label(len(errors), "cell")
            found.append(f"{name} off by {median} in the median of {cells_of}, {most} at the most")
    in_band = cells.frame[STEP_TIME_IN_BAND].dropna()
    if len(in_band):
        found.append(f"{int(in_band.eq(YES).sum()):,} of {len(in_band):,} step times within the band")
    counts = cells.frame[FIT_OUTCOME].value_counts()
    if len(counts):
        outcomes = ", ".join(
            f"{int(counts.get(outcome, 0)):,} {outcome}" for outcome in (RIGHT, WRONG, UNDECIDED)
        )
        found.append(f"verdicts on memory: {outcomes}")
    return [f"Predicted next to measured: {'; '.join(found)}."] if found else []
