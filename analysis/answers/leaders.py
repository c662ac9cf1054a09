"""Length by length: who led in a comparison, or what was measured where strategies are not ranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.comparison import work_number
from analysis.cells.difference import (
    LEVEL_SHARE,
    NO_LINK,
    RateBand,
    SpeedDifference,
    band_difference,
    difference,
    predicted_difference,
    too_few,
)
from analysis.cells.selection import ALL_IN
from analysis.labels import band_label, more_label, number_label, percent_label
from bench.common.labels import length_label, rate_range_label
from bench.common.statistics import MIN_PROCESSES
from bench.cost.band import Fit

MAX_LINES = 100
MAX_FIGURES = 24


class Timed(NamedTuple):
    """One cell of a comparison."""

    name: str
    row: int
    tokens_per_s: float
    processes: int
    """How many gave a speed; of a prediction nothing ran."""
    band: RateBand | None
    """The rates that the link leaves possible; None for measured cells and where its time is not known."""
    is_replayed: bool

    @property
    def text(self) -> str:
        """The speed as text: `43,252`, with a band for a prediction and as a range for a replay."""
        if self.is_replayed:
            return rate_range_label(None if self.band is None else self.band.low, self.tokens_per_s)
        if self.band is None:
            return number_label(self.tokens_per_s)
        return band_label(self.band.expected, self.band.low, self.band.high, number_label)


@dataclass(frozen=True, slots=True)
class Ranking:
    """What may be said of the order of cells that did the same work."""

    seq_len: int
    cells: tuple[Timed, ...]
    """By name."""
    undecided: str | None
    """Why nothing may be said; None where something may, or where there is nothing to compare."""
    first: Timed
    """The one with the most tokens/s, which need not mean anything."""
    lead: tuple[tuple[Timed, SpeedDifference], ...] = ()
    """The first one's speed over each of the others', the nearest first; empty where undecided."""
    not_repeated: tuple[Timed, ...] = ()
    """Cells that ran too few times to be compared with those that did often enough."""

    @property
    def is_predicted(self) -> bool:
        """Whether its cells are arithmetic; they are compared with nothing else."""
        return self.first.band is not None and not self.is_replayed

    @property
    def is_replayed(self) -> bool:
        """Whether one rank of each of its cells ran; they are compared with nothing else."""
        return self.first.is_replayed

    @property
    def is_comparison(self) -> bool:
        return len(self.cells) > 1

    @property
    def is_clear(self) -> bool:
        """Whether the first is faster than every other.

        A claim that needs every one of several tests is wrong no more often than one of them is, so many
        strategies need no correction (R. L. Berger, Multiparameter hypothesis testing, 1982).
        """
        return bool(self.lead) and all(found.is_faster for _, found in self.lead)

    @property
    def is_level(self) -> bool:
        """Whether those that the first is not faster than differ from it by less than LEVEL_SHARE."""
        near = [found for _, found in self.lead if not found.is_faster]
        return bool(near) and all(found.is_level for found in near)

    @property
    def unbeaten(self) -> list[str]:
        """The names of the first and of those that it is not clearly faster than, in alphabetical order."""
        return sorted([self.first.name, *(other.name for other, found in self.lead if not found.is_faster)])


def rankings(cells: Cells) -> list[Ranking]:
    """Per length and kind of work what may be said of its cells, by length.

    Predicted cells of one length are compared by tokens/s also where their degrees differ, and with them the
    sequences of a step.
    """
    groups: dict[tuple[int, bool, int], list[Timed]] = {}
    frame = cells.frame
    any_degree = work_number(frame, but=("sequences_per_step",))
    sizes = frame.reindex(columns=["batch", "grad_accum"])
    free_work = sizes.assign(work=any_degree).groupby([*sizes, "work"], dropna=False, sort=False).ngroup()
    columns = (
        frame["seq_len"],
        cells.are_predicted,
        free_work.where(cells.are_predicted, cells.work),
        cells.names,
        frame.index,
        frame["tokens_per_s"],
        cells.process_counts,
        cells.are_replayed,
    )
    bands, left_out = _bands(cells), _faster_ranks(cells) | _unsure_of_memory(cells, free_work)
    for seq_len, is_predicted, work, name, row, *speed in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        tokens_per_s, processes, is_replayed = speed
        cell = Timed(name, row, tokens_per_s, processes, bands.get(row), is_replayed)
        if cell.processes and row not in left_out:
            groups.setdefault((int(seq_len), is_predicted, work), []).append(cell)
    return [_ranking(key[0], groups[key], cells) for key in sorted(groups)]


def _unsure_of_memory(cells: Cells, work: pd.Series[int]) -> set[int]:
    """Return rows of predicted cells that may not fit where others of the same work fit for certain."""
    predicted = cells.frame[cells.are_predicted & cells.frame["status"].eq("ok")]
    is_unsure = predicted["predicted_fit"].eq(Fit.UNDECIDED)
    has_sure = (~is_unsure).groupby(work[predicted.index]).transform("any")
    return {*predicted.index[is_unsure & has_sure]}


def _faster_ranks(cells: Cells) -> set[int]:
    """Rows of replayed cells of which another rank took longer: a real step lasts as long as that one's."""
    replayed = cells.frame[cells.are_replayed & cells.frame["tokens_per_s"].notna()]
    if "replay.rank" not in cells.keys or replayed.empty:
        return set()
    keys = ["strategy", "seq_len", *(key for key in cells.keys if key != "replay.rank")]
    slowest = replayed.groupby(keys, dropna=False)["tokens_per_s"].idxmin()
    return {*replayed.index} - {*slowest}


def _bands(cells: Cells) -> dict[int, RateBand]:
    """Speeds of predicted cells, and of replayed ones over all their processes, by row.

    A replay is slowest where all of the link's time is exposed, and fastest where none is.
    """
    columns = [f"predicted_tokens_per_s{end}" for end in ("_low", "", "_high")]
    known = cells.frame.loc[cells.are_predicted, columns].dropna()
    found = {row: RateBand(*ends) for row, *ends in known.itertuples()}
    rates = cells.all_processes.groupby(level=0)[["tokens_per_s_with_link", "tokens_per_s"]]
    low, high = rates.min()["tokens_per_s_with_link"].dropna(), rates.max()["tokens_per_s"]
    expected = cells.frame["tokens_per_s"]
    return found | {row: RateBand(low[row], expected[row], high[row]) for row in low.index}


def comparison_lines(found: Sequence[Ranking], *, is_ranked: bool) -> list[str]:
    """Return a line for each comparison: who led, and by how much; else its cells, each with its tokens/s."""
    line_of = _detail if is_ranked else _measured
    rest = len(found) - MAX_LINES
    more = [f"{more_label(rest, 'comparison')}; {ALL_IN}"] if rest > 0 else []
    return [*map(line_of, found[:MAX_LINES]), *more]


def _ranking(seq_len: int, timed: Sequence[Timed], cells: Cells) -> Ranking:
    by_name = tuple(sorted(timed, key=attrgetter("name")))
    first, *others = sorted(timed, key=attrgetter("tokens_per_s"), reverse=True)
    if not others:
        return Ranking(seq_len, by_name, None, first)
    has_bands = all(cell.band is not None for cell in timed)
    repeated = [cell for cell in timed if cell.processes >= MIN_PROCESSES]
    if 1 < len(repeated) < len(timed) and (first.is_replayed or not has_bands):
        ranking = _ranking(seq_len, repeated, cells)
        others = [cell for cell in by_name if cell not in repeated]
        return replace(ranking, cells=by_name, not_repeated=tuple(others))
    counts = {cell.processes for cell in timed}
    if first.is_replayed and not has_bands:
        return Ranking(seq_len, by_name, NO_LINK, first)
    if min(counts) < MIN_PROCESSES and (first.is_replayed or not has_bands):
        return Ranking(seq_len, by_name, too_few(counts), first)
    if has_bands:
        return Ranking(seq_len, by_name, None, first, tuple(_leads_by_band(first, others)))
    own = cells.processes(first.row)
    lead = tuple((other, difference(own, cells.processes(other.row))) for other in others)
    undecided = next((found.undecided for _, found in lead if found.undecided), None)
    return Ranking(seq_len, by_name, undecided, first, () if undecided else lead)


def _leads_by_band(first: Timed, others: Sequence[Timed]) -> Iterator[tuple[Timed, SpeedDifference]]:
    for other in others:
        if first.band is not None and other.band is not None:
            compare = band_difference if first.is_replayed else predicted_difference
            yield other, compare(first.band, other.band)


def _measured(ranking: Ranking) -> str:
    """`8k, in tokens/s: local: 21,217; ring, sp 2: 18,971`."""
    shown = ranking.cells[:MAX_FIGURES]
    figures = [f"{cell.name}: {cell.text}" for cell in shown]
    if len(ranking.cells) > MAX_FIGURES:
        figures.append(f"{more_label(len(ranking.cells) - MAX_FIGURES, 'cell')} in summary.csv")
    return f"{_place(ranking)}, in tokens/s: {'; '.join(figures)}"


def _place(ranking: Ranking) -> str:
    """`8k`, `8k, replayed` or `8k, predicted`."""
    how = ", predicted" if ranking.is_predicted else ", replayed" if ranking.is_replayed else ""
    return length_label(ranking.seq_len) + how


def _detail(ranking: Ranking) -> str:
    """`8k: ulysses, 1,234 tokens/s, 1.20 (1.18 to 1.22) times ring`, or that nothing may be said."""
    if ranking.undecided is not None:
        return f"{_measured(ranking)}; undecided: {ranking.undecided}"
    first = ranking.first
    name = bracketed(first.name) if ranking.is_predicted else first.name
    start = f"{_place(ranking)}: {name}, {first.text} tokens/s"
    if not ranking.lead:
        return f"{start}; nothing to compare it with"
    if ranking.is_predicted:
        return "; ".join([start, *_behind(ranking)])
    ratios = [_ratio(other, found) for other, found in ranking.lead[:MAX_FIGURES]]
    once = ", ".join(f"{cell.name}: {cell.text}" for cell in ranking.not_repeated[:MAX_FIGURES])
    return f"{start}, {'; '.join(ratios)}" + (f"; too few processes to compare: {once}" if once else "")


def _behind(ranking: Ranking) -> Iterator[str]:
    """Yield `no clear difference: usp (sp 4)` and `slower: ring (sp 8) by 9.8 %` of a prediction."""
    level = [bracketed(other.name) for other, found in ranking.lead if not found.is_faster]
    slower = [
        f"{bracketed(other.name)} by {percent_label(1 - 1 / found.ratio)}"
        for other, found in ranking.lead
        if found.is_faster and found.ratio
    ]
    for said, names in {"no clear difference": level, "slower": slower}.items():
        rest = [more_label(len(names) - MAX_FIGURES, "cell")] if len(names) > MAX_FIGURES else []
        if names:
            yield f"{said}: {', '.join([*names[:MAX_FIGURES], *rest])}"


def bracketed(name: str) -> str:
    """Return `ring (sp 2)` for `ring, sp 2`: a name that can stand in a list."""
    strategy, _, settings = name.partition(", ")
    return f"{strategy} ({settings})" if settings else name


def _ratio(other: Timed, found: SpeedDifference) -> str:
    level = f", no difference above {LEVEL_SHARE:.0%}".replace("%", " %")
    clear = "" if found.is_faster else level if found.is_level else ", no clear difference"
    by_ranges = "" if other.band is None else " by both ranges"
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f}{by_ranges}) times {other.name}{clear}"
