"""States how records were made: by which code, in a replay, in an observed loop, or by prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain

import pandas as pd

from analysis.answers.wording import bracket_settings, join_words, names_at_lengths
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
from analysis.cells.statuses import REPLAY_UNDECIDED, SPARE_BYTES, shown_statuses
from analysis.labels import count_label, percent_label
from analysis.read.archive import ORIGIN_COLUMNS, Archive, origins
from analysis.read.checks import NAME_SEPARATOR
from bench.common.command import sweep_command
from bench.common.labels import length_label, size_label
from bench.config import NOT_USED
from bench.record.record import Status

STATED_ORIGINS = "code", "torch"
"""Keys of ORIGIN_COLUMNS that only these sentences state; every figure names its device."""
REPLAY_NOTE = (
    "Replayed: only one rank of each cell ran. Its kernels, memory and host work are measured. It received"
    " copies of its own data, and communication took no time. The time on the link is modelled, so a speed is"
    " a range: from all of the link's time exposed to none of it."
)
REPEATED_SETTINGS = ("model", "layout", "kernel", "dtype", "engine")
"""Settings that the command repeats where all cells have the same value."""
NO_LINK_RATES = "The speed of the link is not known here, so these tokens/s are upper bounds."


def origin_lines(archive: Archive, frame: pd.DataFrame, mixed: Collection[str]) -> list[str]:
    """Return which origins are kept apart, which count as equal because of --mix, and what is left out.

    Args:
        archive: records of the report.
        frame: frame of the records before --mix made any origins equal.
        mixed: keys of ORIGIN_COLUMNS that --mix names.

    Returns:
        Sentences; none for a sweep with one code and one torch in which no cell ran again.
    """
    several = {kind: origins(frame, kind) for kind in ORIGIN_COLUMNS}
    different = {
        kind: values
        for kind, values in several.items()
        if kind in STATED_ORIGINS and kind not in mixed and len(values) > 1
    }
    equal = [f"{kind} {' and '.join(several[kind])}" for kind in mixed if len(several[kind]) > 1]
    lines = []
    if different:
        versions = [
            f"{len(values)} versions of {kind} ({', '.join(values)})" for kind, values in different.items()
        ]
        options = " ".join(f"--mix {kind}" for kind in different)
        lines.append(
            f"The records were made with {' and '.join(versions)}. Series and speed-ups keep the versions"
            f" apart; analysis.report {options} compares them."
        )
    if equal:
        lines.append(f"These count as equal because of --mix: {'; '.join(equal)}.")
    if archive.left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in archive.left_out.items())
        total = sum(archive.left_out.values())
        lines.append(f"Left out: {count_label(total, 'earlier record')} of cells that ran again ({reasons}).")
    return lines


def observed_lines(cells: Cells) -> list[str]:
    """Return `Observed loop ring at 8k, checked: tokens; not checked: objective (no loss).` for each loop."""
    rows = cells.frame[cells.are_observed & cells.frame["status"].eq(Status.OK)]
    names_of_checks: dict[str, list[str]] = {}
    for row, seq_len, checks in rows[["seq_len", "checks_of_loop"]].dropna().itertuples():
        name = f"{bracket_settings(cells.names[row])} at {length_label(int(seq_len))}"
        names_of_checks.setdefault(checks, []).append(name)
    return [f"Observed loop {join_words(names)}, {checks}." for checks, names in names_of_checks.items()]


def unchecked_lines(summary: pd.DataFrame) -> list[str]:
    """Return sentences on steps that were not compared, checks that were not made, and unknown checks.

    Cells without a result do not count.
    """
    done = summary.loc[summary["status"] == "ok", ["checks", "checks_missing", "steps", "steps_compared"]]
    known = done[done["checks"].notna()]
    steps, compared = int(known["steps"].sum()), int(known["steps_compared"].sum())
    names = chain.from_iterable(text.split(NAME_SEPARATOR) for text in known["checks_missing"].dropna())
    cells = count_label(len(known), "cell")
    missing = [f"{name} in {count:,} of {cells}" for name, count in Counter(names).items()]
    lines = []
    if steps > compared > 0:
        lines.append(
            f"In {compared:,} of {steps:,} steps (warm-up, timed, inspected and traced), the loss agrees with"
            " that of another cell that trains on the same tokens. The comparison leaves out the other"
            f" {count_label(steps - compared, 'step')}: there is no such cell, or rounding errors have added"
            " up over the steps before."
        )
    elif steps > compared:
        lines.append(
            f"The losses of {count_label(steps, 'step')} are compared with nothing, because no other cell"
            " trains on the same tokens."
        )
    if missing:
        lines.append(
            f"Not checked: {'; '.join(missing)}. report.html gives the reasons in the details of each cell."
        )
    if len(known) < len(done):
        of_cells = f"{len(done) - len(known):,} of {count_label(len(done), 'cell')}"
        lines.append(f"The records of {of_cells} do not say what was checked.")
    return lines


def replay_lines(cells: Cells) -> list[str]:
    """Return what a replay measures and models, which memory is undecided, and how to check results."""
    if not (cells.are_replayed & cells.frame["status"].ne(Status.UNSUPPORTED)).any():
        return []
    lines = [REPLAY_NOTE]
    ok = cells.frame[cells.are_replayed & cells.frame["status"].eq(Status.OK)]
    if ok["link_ms"].isna().any():
        lines.append(NO_LINK_RATES)
    tight = shown_statuses(cells.frame).eq(REPLAY_UNDECIDED)
    if tight.any():
        spare = size_label(SPARE_BYTES)
        lines.append(
            f"It is undecided whether memory suffices for {names_at_lengths(cells, tight)}: less than {spare}"
            " was left free, and NCCL may need it."
        )
    sharing = ok[ok["sp_degree"].gt(1)]
    if len(sharing):
        lines.append(
            "A replay does not check losses, gradients and attention's values. To check them on real ranks,"
            f" run: {_check_command(sharing)}"
        )
    return lines


def _check_command(sharing: pd.DataFrame) -> str:
    """Return the command that runs real ranks at a short length, in the cells' smallest sequence group."""
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
    return f"{sweep_command()} -m seq_len=1k model.num_layers=1 {' '.join(words)}"


def prediction_lines(cells: Cells) -> list[str]:
    """Return a sentence on the errors of all predictions; none where no cell was predicted and measured."""
    parts = []
    for name, column in {"step time": STEP_TIME, "peak allocated": PEAK}.items():
        errors = cells.frame[column].dropna().abs()
        if len(errors):
            median, largest = percent_label(errors.median()), percent_label(errors.max())
            count = count_label(len(errors), "cell")
            parts.append(f"{name} off by {median} in the median of {count} and by {largest} at most")
    in_band = cells.frame[STEP_TIME_IN_BAND].dropna()
    if len(in_band):
        parts.append(f"{int(in_band.eq(YES).sum()):,} of {len(in_band):,} step times within the band")
    counts = cells.frame[FIT_OUTCOME].value_counts()
    if len(counts):
        outcomes = ", ".join(
            f"{int(counts.get(outcome, 0)):,} {outcome}" for outcome in (RIGHT, WRONG, UNDECIDED)
        )
        parts.append(f"memory verdicts {outcomes}")
    return [f"Predictions compared with measurements: {'; '.join(parts)}."] if parts else []
