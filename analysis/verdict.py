"""The answer in sentences: which strategy was fastest at which length, what failed, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.comparison import work_number
from analysis.labels import count_label, is_cpu, number_label, status_label
from analysis.series import series_keys, variant
from bench.words import length_label

CPU_CAVEAT = "A CPU shows that the loop works, not which strategy is faster on GPUs: it ranks nothing."


@dataclass(frozen=True, slots=True)
class Leader:
    """The cell with the most tokens/s among comparable ones; `runner_up` is None where it was alone."""

    name: str
    seq_len: int
    tokens_per_s: float
    runner_up: str | None
    ratio: float | None
    is_clear: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sentences, each complete by itself; `caveat` is None where none is due."""

    answer: str
    details: list[str]
    failures: list[str]
    fits: list[str]
    certainty: str
    caveat: str | None


def verdict(summary: pd.DataFrame) -> Verdict:
    """What these cells say; no comparison leaves its length, work, machine and provenance."""
    found = leaders(summary)
    on_cpu = is_cpu(summary)
    return Verdict(
        answer=_ran(summary) if on_cpu else _fastest(found),
        details=[_detail(leader) for leader in found],
        failures=_failures(summary),
        fits=_fits(summary),
        certainty=_certainty(summary),
        caveat=CPU_CAVEAT if on_cpu else None,
    )


def leaders(summary: pd.DataFrame) -> list[Leader]:
    """Per length and kind of work the fastest cell, by length.

    It is clear when its interval lies above the runner-up's; without both intervals it is not.
    """
    timed = summary[summary["tokens_per_s"].notna()]
    if timed.empty:
        return []
    names = cell_names(summary)
    groups = timed.groupby(work_number(summary)[timed.index], sort=False)
    found = [_leader(rows.sort_values("tokens_per_s", ascending=False), names) for _, rows in groups]
    return sorted(found, key=lambda leader: leader.seq_len)


def cell_names(summary: pd.DataFrame) -> pd.Series[str]:
    """Per cell its strategy and what sets it apart from others of that strategy."""
    keys = series_keys(summary)
    names = [
        ", ".join(filter(None, (str(row["strategy"]), variant(row, keys))))
        for _, row in summary[["strategy", *keys]].iterrows()
    ]
    return pd.Series(names, index=summary.index, dtype="object")


def _leader(rows: pd.DataFrame, names: pd.Series[str]) -> Leader:
    first = rows.iloc[0]
    common = (names[rows.index[0]], int(first["seq_len"]), float(first["tokens_per_s"]))
    if len(rows) == 1:
        return Leader(*common, None, None, is_clear=False)
    second = rows.iloc[1]
    ratio = float(first["tokens_per_s"] / second["tokens_per_s"])
    is_clear = bool(first["tokens_per_s_low"] > second["tokens_per_s_high"])
    return Leader(*common, names[rows.index[1]], ratio, is_clear)


def _fastest(found: Sequence[Leader]) -> str:
    """One sentence: who led at which lengths, and where not clearly."""
    rivals = [leader for leader in found if leader.runner_up is not None]
    if not rivals:
        return "No length has two comparable results, so no strategy is ahead of another."
    where = _by_name((leader.name, leader.seq_len) for leader in rivals)
    sentence = f"Most tokens/s: {_places(where)}."
    unclear = _by_name((leader.name, leader.seq_len) for leader in rivals if not leader.is_clear)
    if unclear:
        why = "the 95 % intervals of the first two overlap, or one has none"
        sentence += f" Not clearly ahead: {_places(unclear)}; {why}."
    return sentence


def _ran(summary: pd.DataFrame) -> str:
    """One sentence for a CPU, which ranks nothing: what ran at which lengths."""
    done = summary[summary["status"] == "ok"]
    if done.empty:
        return "No cell has a result."
    names = cell_names(summary)[done.index]
    lengths: dict[tuple[int, ...], list[str]] = {}
    for name, where in _by_name(zip(names, done["seq_len"], strict=True)).items():
        lengths.setdefault(tuple(sorted(where)), []).append(name)
    parts = [f"{_listed(who)} at {_listed(map(length_label, where))}" for where, who in lengths.items()]
    return f"Ran, and trained on the tokens of every step: {'; '.join(parts)}."


def _detail(leader: Leader) -> str:
    start = f"{length_label(leader.seq_len)}: {leader.name}, {number_label(leader.tokens_per_s)} tokens/s"
    if leader.runner_up is None or leader.ratio is None:
        return f"{start}; nothing to compare it with"
    clear = "" if leader.is_clear else ", no clear difference"
    return f"{start}, {leader.ratio:.2f} times {leader.runner_up}{clear}"


def _failures(summary: pd.DataFrame) -> list[str]:
    """One sentence per status: who met it and at which lengths; running out of memory comes first."""
    failed = summary[summary["status"] != "ok"]
    names = cell_names(summary)
    statuses = sorted(failed["status"].unique(), key=lambda status: status != "out_of_memory")
    sentences = []
    for status in statuses:
        cells = failed[failed["status"] == status]
        where = _by_name(zip(names[cells.index], cells["seq_len"], strict=True))
        label = "out of memory" if status == "out_of_memory" else status_label(status)
        sentences.append(f"{label.capitalize()}: {_places(where)}.")
    return sentences


def _fits(summary: pd.DataFrame) -> list[str]:
    """One sentence where anything ran out of memory: the longest length that fits, per series of cells."""
    if not (summary["status"] == "out_of_memory").any():
        return []
    names = cell_names(summary)
    parts = [_longest(name, cells) for name, cells in summary.groupby(names, sort=False)]
    return [f"Longest length that fits in memory: {'; '.join(parts)}."]


def _longest(name: str, cells: pd.DataFrame) -> str:
    """`ring 64k (96k runs out)`, or that nothing longer was tried."""
    fitting = cells.loc[cells["status"] == "ok", "seq_len"]
    longest = int(fitting.max()) if len(fitting) else 0
    failing = cells.loc[cells["status"] == "out_of_memory", "seq_len"]
    beyond = failing[failing > longest]
    if not len(beyond):
        return f"{name} {length_label(longest)} (nothing longer was tried)" if longest else f"{name} unknown"
    shortest = length_label(int(beyond.min()))
    return f"{name} {length_label(longest) if longest else 'none'} ({shortest} runs out)"


def _certainty(summary: pd.DataFrame) -> str:
    timed = summary[summary["n"].notna()]
    if timed.empty:
        return "No cell has a timed result."
    parts = []
    for n_of, cells in timed.groupby("n_of"):
        low, high = int(cells["n"].min()), int(cells["n"].max())
        n = str(low) if low == high else f"{low} to {high}"
        parts.append(f"{count_label(len(cells), 'cell')} with n={n} {n_of}")
    with_interval = int(timed["tokens_per_s_low"].notna().sum())
    return (
        f"How sure: {_listed(parts)}; {with_interval} of {len(timed)} have a 95 % interval of the median"
        " (it takes n >= 6)."
    )


def _by_name(cells: Iterable[tuple[str, Any]]) -> dict[str, set[int]]:
    where: dict[str, set[int]] = {}
    for name, seq_len in cells:
        where.setdefault(name, set()).add(int(seq_len))
    return where


def _places(where: Mapping[str, set[int]]) -> str:
    return "; ".join(
        f"{name} at {_listed(map(length_label, sorted(lengths)))}" for name, lengths in where.items()
    )


def _listed(items: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = [*items]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
