"""Why cells have no result: each distinct reason once, with the names of the cells that met it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from analysis.answers.verdict import where
from analysis.cells.cells import Cells
from analysis.cells.selection import ALL_IN
from analysis.cells.statuses import shown_statuses
from analysis.labels import count_label, status_label
from bench.record.record import Status

MAX_REASONS = 40
UNKNOWN = "no reason recorded"
_UNITS = {"k": 2**10, "m": 2**20, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FIGURE = re.compile(r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(k|m| [KMGT]iB| B)?(?!\w)")
"""A figure that is no part of a word: `512`, `1,024`, `64k`, `56.2 MiB`."""
_RANK = re.compile(r"rank \d+, [^:]*: ")
"""Which rank ran out of memory first, and where in a step, is chance; its shortage is not."""


def failure_reasons(cells: Cells) -> list[str]:
    """`OOM (2), ring at 64k and 96k: no room for ...` for every distinct reason, in the order of cells.

    Reasons that differ in figures alone are one, with the range of each. Of too many the most frequent.
    """
    failed = cells.frame[cells.frame["status"] != "ok"]
    if failed.empty:
        return []
    told = pd.DataFrame({"status": shown_statuses(failed), "reason": _comparable(failed)})
    told["pattern"] = [_FIGURE.sub("#", reason) for reason in told["reason"]]
    groups = [each for _, each in told.groupby(["status", "pattern"], sort=False)]
    shown = sorted(range(len(groups)), key=lambda number: -len(groups[number]))[:MAX_REASONS]
    lines = [_line(cells, groups[number]) for number in sorted(shown)]
    rest = len(groups) - len(shown)
    if rest:
        others = len(failed) - sum(len(groups[number]) for number in shown)
        lines.append(f"{rest:,} more reasons, of {count_label(others, 'cell')}; {ALL_IN}")
    return lines


def _comparable(failed: pd.DataFrame) -> list[str]:
    """The reasons without what differs by chance."""
    return [
        _RANK.sub("", reason, count=1) if status == Status.OUT_OF_MEMORY else reason
        for status, reason in zip(failed["status"], failed["reason"].fillna(UNKNOWN), strict=True)
    ]


def _line(cells: Cells, met: pd.DataFrame) -> str:
    named = where(cells, cells.frame.index.to_series().isin(met.index))
    return f"{status_label(met['status'].iloc[0])} ({len(met)}), {named}: {merged([*met['reason'].unique()])}"


def merged(reasons: Sequence[str]) -> str:
    """Reasons of one pattern as one: where a figure differs stand the lowest and the highest."""
    figures = zip(*(_FIGURE.finditer(reason) for reason in reasons), strict=True)
    ranges = iter([_range(found) for found in figures])
    return _FIGURE.sub(lambda _: next(ranges), reasons[0])


def _range(found: Iterable[re.Match[str]]) -> str:
    by_size = sorted({each[0]: _size(each) for each in found}.items(), key=lambda item: item[1])
    low, high = by_size[0][0], by_size[-1][0]
    return low if low == high else f"{low} to {high}"


def _size(figure: re.Match[str]) -> float:
    return float(figure[1].replace(",", "") + (figure[2] or "")) * _UNITS.get((figure[3] or "").strip(), 1)
