"""States which cells have no result and why, and the longest lengths that fit in memory."""

from __future__ import annotations

import re

import pandas as pd

from analysis.answers.wording import bracket_settings, names_at_lengths
from analysis.cells.cells import Cells
from analysis.cells.selection import ALL_IN_CSV
from analysis.cells.statuses import REPLAY_UNDECIDED, UNDECIDED, shown_statuses
from analysis.labels import count_label, more_label, percent_label, status_label
from bench.common.labels import length_label
from bench.cost.band import Fit
from bench.record.record import Status

MAX_REASONS = 40
MAX_SERIES_NAMED = 12
MEMORY_COLUMNS = [
    "status", "seq_len", "provenance", "predicted_fit", "cluster.world_size", "device_memory_bytes",
    "device_used_bytes",
]  # fmt: skip
"""Columns that a sentence on memory reads. Copying all columns of many cells takes long."""
UNKNOWN = "no reason recorded"
_NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*(k|m| [KMGT]iB| B)?(?!\w)")
"""A number outside a word, with its unit: `512`, `1,024`, `64k`, `56.2 MiB`."""
_RANK = re.compile(r"rank \d+, [^:]*: ")
"""Rank and phase of an out-of-memory error. They are chance, so reasons that differ in them count as one."""


def failure_counts(cells: Cells) -> list[str]:
    """Return a sentence for each status other than ok, with names and lengths; out of memory comes first."""
    summary, predicted, replayed = cells.frame, cells.are_predicted, cells.are_replayed
    ran_out = summary["status"] == "out_of_memory"
    undecided = predicted & summary["predicted_fit"].eq(Fit.UNDECIDED) & summary["status"].eq("ok")
    kinds = {
        "Out of memory": ran_out & ~predicted & ~replayed,
        "Out of memory in a replay": ran_out & replayed,
        "Predicted to run out of memory": ran_out & predicted,
        "The model cannot decide whether these cells fit in memory": undecided,
    }
    statuses = summary["status"][~ran_out & summary["status"].ne("ok")].unique()
    kinds |= {status_label(status).capitalize(): summary["status"].eq(status) for status in sorted(statuses)}
    return [f"{kind}: {names_at_lengths(cells, rows)}." for kind, rows in kinds.items() if rows.any()]


def longest_that_fit(cells: Cells) -> list[str]:
    """Return sentences on the longest length that fits in memory, naming at most MAX_SERIES_NAMED series.

    There is one sentence each for measured, replayed and predicted cells, if any of them ran out of memory or
    may run out of it. If no measured cell ran out, a sentence says so.
    """
    predicted, replayed = cells.are_predicted, cells.are_replayed
    kinds = {
        "Longest length that fits in memory": ~predicted & ~replayed,
        "Longest length that fits in a replay, without NCCL's memory": replayed,
        "Longest length predicted to fit in memory": predicted,
    }
    longest_of_kind = {
        kind: _longest_of_names(cells.frame.loc[rows, MEMORY_COLUMNS], cells.names[rows])
        for kind, rows in kinds.items()
    }
    lines = [f"{kind}: {longest}." for kind, longest in longest_of_kind.items() if longest]
    measured = cells.frame[~predicted & ~replayed]
    if measured["status"].eq("ok").any() and measured["status"].ne("out_of_memory").all():
        lines.append(f"No cell ran out of memory.{_highest_peak(measured, cells)}")
    return lines


def _highest_peak(measured: pd.DataFrame, cells: Cells) -> str:
    """Return a sentence on the peak that came nearest to its capacity; empty where no capacity is known."""
    share = measured["capacity_share"].astype("float64").dropna()
    if share.empty:
        return ""
    row = share.index[int(share.argmax())]
    place = f"{bracket_settings(cells.names[row])} at {length_label(int(measured.loc[row, 'seq_len']))}"
    return f" The highest peak allocated, of {place}, was {percent_label(share[row])} of the capacity."


def _longest_of_names(summary: pd.DataFrame, names: pd.Series[str]) -> str:
    """Return `ring: 64k (96k runs out)` for each name; empty where all cells fit."""
    ran_out = summary["status"] == "out_of_memory"
    may_run_out = shown_statuses(summary).isin([UNDECIDED, REPLAY_UNDECIDED])
    if not (ran_out | may_run_out).any():
        return ""
    lengths = summary["seq_len"]
    longest = lengths[summary["status"].eq("ok") & ~may_run_out].groupby(names).max()
    is_beyond = lengths > names.map(longest).fillna(0)
    out, unsure = (lengths[rows & is_beyond].groupby(names).min() for rows in (ran_out, may_run_out))
    sorted_names = sorted(names.unique(), key=lambda name: name not in out.index and name not in unsure.index)
    parts = [
        _longest(name, longest.get(name), out.get(name), unsure.get(name))
        for name in sorted_names[:MAX_SERIES_NAMED]
    ]
    rest = len(sorted_names) - len(parts)
    more = [f"{more_label(rest, 'setting')}; {ALL_IN_CSV}"] if rest else []
    return "; ".join([*parts, *more])


def _longest(name: str, fits: int | None, runs_out: int | None, undecided: int | None) -> str:
    """Return `ring: 64k (96k undecided, 128k runs out)`, or `ring: at least 64k` if no length ran out."""
    beyond = [(undecided, "undecided"), (runs_out, "runs out")]
    longer = [f"{length_label(int(length))} {outcome}" for length, outcome in beyond if length is not None]
    name = bracket_settings(name)
    if not longer:
        return f"{name}: at least {length_label(int(fits))}" if fits else f"{name}: unknown"
    return f"{name}: {length_label(int(fits)) if fits else 'none'} ({', '.join(longer)})"


def failure_reasons(cells: Cells) -> list[str]:
    """Return `OOM in 2 cells, ring at 64k and 96k: no room for ...` for each reason, in the order of cells.

    Reasons that differ only in numbers count as one, and the first of them is shown. If there are more than
    MAX_REASONS reasons, the most frequent are listed.
    """
    failed = cells.frame.loc[cells.frame["status"] != "ok", [*MEMORY_COLUMNS, "reason"]]
    if failed.empty:
        return []
    reasons = pd.DataFrame({"status": shown_statuses(failed), "reason": failed["reason"].fillna(UNKNOWN)})
    pattern = reasons["reason"].str.replace(_RANK, "", n=1, regex=True)
    pattern = pattern.where(failed["status"].eq(Status.OUT_OF_MEMORY), reasons["reason"])
    pattern = pattern.str.replace(_NUMBER, "#", regex=True)
    groups = [group for _, group in reasons.groupby(["status", pattern], sort=False)]
    shown = sorted(groups, key=len, reverse=True)[:MAX_REASONS]
    lines = []
    for group in sorted(shown, key=lambda group: group.index[0]):
        label, is_in_group = status_label(group["status"].iloc[0]), cells.frame.index.isin(group.index)
        names = names_at_lengths(cells, pd.Series(is_in_group, index=cells.frame.index))
        example = "for example, " if len(group["reason"].unique()) > 1 else ""
        count = count_label(len(group), "cell")
        lines.append(f"{label} in {count}, {names}: {example}{group['reason'].iloc[0]}")
    rest = len(groups) - len(shown)
    if rest:
        others = count_label(len(failed) - sum(map(len, shown)), "cell")
        lines.append(f"{count_label(rest, 'more reason')} in {others}; {ALL_IN_CSV}")
    return lines
