"""Cells without a result: how many there are, why, and the longest lengths that fit in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from analysis.answers.wording import names_at_lengths
from analysis.cells.cells import Cells
from analysis.cells.selection import ALL_IN
from analysis.cells.statuses import NO_SPARE, UNDECIDED, shown_statuses
from analysis.labels import count_label, more_label, status_label
from bench.common.labels import length_label
from bench.cost.band import Fit
from bench.record.record import Status

MAX_REASONS = 40
MAX_SERIES_NAMED = 12
FITTED_BY = [
    "status", "seq_len", "provenance", "predicted_fit", "cluster.world_size", "device_memory_bytes",
    "device_used_bytes",
]  # fmt: skip
"""The columns that a sentence on memory reads: all columns of many cells take long to copy."""
UNKNOWN = "no reason recorded"
_UNITS = {"": 1, "B": 1, "k": 2**10, "m": 2**20, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FIGURE = re.compile(r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(k|m| [KMGT]iB| B)?(?!\w)")
"""A figure that is no part of a word: `512`, `1,024`, `64k`, `56.2 MiB`."""
_RANK = re.compile(r"rank \d+, [^:]*: ")
"""Which rank ran out of memory first, and where in a step, is chance; its shortage is not."""


def failure_counts(cells: Cells) -> list[str]:
    """Return the number of failed cells and a sentence per status with names and lengths, memory first."""
    summary, predicted, replayed = cells.frame, cells.are_predicted, cells.are_replayed
    ran_out = summary["status"] == "out_of_memory"
    undecided = predicted & summary["predicted_fit"].eq(Fit.UNDECIDED) & summary["status"].eq("ok")
    kinds = {
        "Out of memory": ran_out & ~predicted & ~replayed,
        "Out of memory in a replay": ran_out & replayed,
        "Predicted to run out of memory": ran_out & predicted,
        "Not decided by the model whether there is memory": undecided,
    }
    others = summary["status"][~ran_out & summary["status"].ne("ok")].unique()
    kinds |= {status_label(status).capitalize(): summary["status"].eq(status) for status in sorted(others)}
    lines = [f"{said}: {names_at_lengths(cells, rows)}." for said, rows in kinds.items() if rows.any()]
    if len(lines) == 1 or predicted.any() or replayed.any():
        return lines
    failed = int(summary["status"].ne("ok").sum())
    return [f"{failed} of {count_label(len(cells), 'cell')} have no result.", *lines] if lines else []


def longest_that_fit(cells: Cells) -> list[str]:
    """Return sentences on the longest length that fits in memory, naming at most MAX_SERIES_NAMED series.

    Measured, replayed and predicted cells each have one where any of them ran out or may run out of memory.
    Another says so where all predicted cells fit.
    """
    predicted, replayed = cells.are_predicted, cells.are_replayed
    kinds = {
        "Longest length that fits in memory": ~predicted & ~replayed,
        "Longest length that fits in a replay, without NCCL's memory": replayed,
        "Longest length predicted to fit in memory": predicted,
    }
    found = {
        said: _longest_of(cells.frame.loc[rows, FITTED_BY], cells.names[rows]) for said, rows in kinds.items()
    }
    fitting = cells.frame.loc[predicted, "predicted_fit"].eq(Fit.FITS)
    all_fit = ["Every predicted cell fits in memory."] if len(fitting) and fitting.all() else []
    return [*(f"{said}: {longest}." for said, longest in found.items() if longest), *all_fit]


def _longest_of(summary: pd.DataFrame, names: pd.Series[str]) -> str:
    """Per series `ring 64k (96k runs out)`; empty where all have room."""
    ran_out = summary["status"] == "out_of_memory"
    may_run_out = shown_statuses(summary).isin([UNDECIDED, NO_SPARE])
    if not (ran_out | may_run_out).any():
        return ""
    lengths = summary["seq_len"]
    longest = lengths[summary["status"].eq("ok") & ~may_run_out].groupby(names).max()
    is_beyond = lengths > names.map(longest).fillna(0)
    out, unsure = (lengths[rows & is_beyond].groupby(names).min() for rows in (ran_out, may_run_out))
    every = sorted(names.unique(), key=lambda name: name not in out.index and name not in unsure.index)
    parts = [
        _longest(name, longest.get(name), out.get(name), unsure.get(name))
        for name in every[:MAX_SERIES_NAMED]
    ]
    rest = len(every) - len(parts)
    more = [f"{more_label(rest, 'setting')}; {ALL_IN}"] if rest else []
    return "; ".join([*parts, *more])


def _longest(name: str, fits: int | None, runs_out: int | None, undecided: int | None) -> str:
    """`ring 64k (96k undecided, 128k runs out)`, or that no length ran out."""
    beyond = [(undecided, "undecided"), (runs_out, "runs out")]
    longer = [f"{length_label(int(length))} {what}" for length, what in beyond if length is not None]
    if not longer:
        return f"{name} {length_label(int(fits))} (limit not found)" if fits else f"{name} unknown"
    return f"{name} {length_label(int(fits)) if fits else 'none'} ({', '.join(longer)})"


def failure_reasons(cells: Cells) -> list[str]:
    """`OOM (2), ring at 64k and 96k: no room for ...` for every distinct reason, in the order of cells.

    Reasons that differ in figures alone are one, with the range of each. Of too many the most frequent.
    """
    failed = cells.frame.loc[cells.frame["status"] != "ok", [*FITTED_BY, "reason"]]
    if failed.empty:
        return []
    whole = failed["reason"].fillna(UNKNOWN)
    ran_out = failed["status"].eq(Status.OUT_OF_MEMORY)
    reason = whole.mask(ran_out, whole.str.replace(_RANK, "", n=1, regex=True))
    reasons = pd.DataFrame({"status": shown_statuses(failed), "reason": reason})
    pattern = reason.str.replace(_FIGURE, "#", regex=True)
    groups = [each for _, each in reasons.groupby(["status", pattern], sort=False)]
    shown = sorted(range(len(groups)), key=lambda number: -len(groups[number]))[:MAX_REASONS]
    lines = []
    for group in (groups[number] for number in sorted(shown)):
        label, named = status_label(group["status"].iloc[0]), cells.frame.index.to_series().isin(group.index)
        text = merged([*group["reason"].unique()])
        lines.append(f"{label} ({len(group)}), {names_at_lengths(cells, named)}: {text}")
    rest = len(groups) - len(shown)
    if rest:
        others = len(failed) - sum(len(groups[number]) for number in shown)
        lines.append(f"{rest:,} more reasons, of {count_label(others, 'cell')}; {ALL_IN}")
    return lines


def merged(reasons: Sequence[str]) -> str:
    """Reasons of one pattern as one: where a figure differs stand the lowest and the highest."""
    figures = zip(*(_FIGURE.finditer(reason) for reason in reasons), strict=True)
    ranges = iter([_range(found) for found in figures])
    return _FIGURE.sub(lambda _: next(ranges), reasons[0])


def _range(found: Iterable[re.Match[str]]) -> str:
    """Return the lowest and the highest of some figures; one where all are equal."""
    sizes = {
        figure[0]: float(figure[1].replace(",", "") + (figure[2] or "")) * _UNITS[(figure[3] or "").strip()]
        for figure in found
    }
    return " to ".join(dict.fromkeys((min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__))))
