"""Compares the cells of each length: which strategy led, or the speeds where strategies are not ranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import pandas as pd

from analysis.answers.wording import bracket_settings
from analysis.cells.cells import Cells
from analysis.cells.comparison import work_number
from analysis.cells.difference import (
    LEVEL_SHARE,
    NO_LINK,
    RateBand,
    SpeedDifference,
    band_difference,
    predicted_difference,
    speed_difference,
    too_few_processes,
)
from analysis.cells.selection import ALL_IN_CSV
from analysis.labels import band_label, more_label, number_label, percent_label
from bench.common.labels import length_label, rate_range_label
from bench.common.statistics import MIN_PROCESSES
from bench.cost.band import Fit

MAX_LINES = 100
MAX_CELLS = 24
"""Largest number of cells in one line."""


@dataclass(frozen=True, slots=True)
class CellSpeed:
    """Speed of one cell in a comparison."""

    name: str
    row: int
    tokens_per_s: float
    process_count: int
    """Number of processes that gave a speed, or of predictions, for which nothing ran."""
    band: RateBand | None
    """Speeds that the link leaves possible; None for a measured cell and where the link's time is unknown."""
    is_replayed: bool

    @property
    def text(self) -> str:
        """The speed as text: `43,252`, with its band for a prediction, as a range for a replay."""
        if self.is_replayed:
            return rate_range_label(None if self.band is None else self.band.low, self.tokens_per_s)
        if self.band is None:
            return number_label(self.tokens_per_s)
        return band_label(self.band.expected, self.band.low, self.band.high, number_label)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Order of the cells with the same workload and length, as far as it can be stated."""

    seq_len: int
    cells: tuple[CellSpeed, ...]
    """All cells of the comparison, sorted by name."""
    undecided: str | None
    """Reason why no order can be stated; None where one can, or where there is only one cell."""
    first: CellSpeed
    """Cell with the most tokens/s, whether or not its lead means anything."""
    lead: tuple[tuple[CellSpeed, SpeedDifference], ...] = ()
    """Speed of the first cell over every other cell, the nearest first; empty where undecided."""
    not_repeated: tuple[CellSpeed, ...] = ()
    """Cells with too few processes to be compared, where others have enough."""

    @property
    def is_predicted(self) -> bool:
        """Whether the cells are predictions; these are compared only with each other."""
        return self.first.band is not None and not self.is_replayed

    @property
    def is_replayed(self) -> bool:
        """Whether the cells are replays; these are compared only with each other."""
        return self.first.is_replayed

    @property
    def is_comparison(self) -> bool:
        return len(self.cells) > 1

    @property
    def is_clear(self) -> bool:
        """Whether the first cell is faster than every other cell.

        The claim holds only if every one of the tests holds, so it is wrong no more often than a single test.
        Many strategies therefore need no correction (R. L. Berger, Multiparameter hypothesis testing, 1982).
        """
        return bool(self.lead) and all(speed_difference.is_faster for _, speed_difference in self.lead)

    @property
    def is_level(self) -> bool:
        """Whether there are cells that the first is not faster than, all within LEVEL_SHARE of its speed."""
        near = [speed_difference for _, speed_difference in self.lead if not speed_difference.is_faster]
        return bool(near) and all(speed_difference.is_level for speed_difference in near)

    @property
    def unbeaten(self) -> list[str]:
        """Names of the first cell and of those that it is not clearly faster than, sorted."""
        near = [cell.name for cell, speed_difference in self.lead if not speed_difference.is_faster]
        return sorted([self.first.name, *near])


def rankings(cells: Cells) -> list[Ranking]:
    """Return a ranking for each length and workload, sorted by length.

    Predicted cells of one length are compared by tokens/s even where they differ in their degrees of
    parallelism, and therefore in the number of sequences of a step. Cells without a speed are left out.
    """
    groups: dict[tuple[int, bool, int], list[CellSpeed]] = {}
    frame = cells.frame
    any_degree = work_number(frame, ignored=("sequences_per_step",))
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
    bands = _bands(cells)
    left_out = _rows_of_faster_ranks(cells) | _rows_that_may_not_fit(cells, free_work)
    for seq_len, is_predicted, work, name, row, tokens_per_s, process_count, is_replayed in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        cell = CellSpeed(name, row, tokens_per_s, process_count, bands.get(row), is_replayed)
        if cell.process_count and row not in left_out:
            groups.setdefault((int(seq_len), is_predicted, work), []).append(cell)
    return [_ranking(key[0], groups[key], cells) for key in sorted(groups)]


def _rows_that_may_not_fit(cells: Cells, work: pd.Series[int]) -> set[int]:
    """Return rows of predicted cells that may not fit in memory, if another of the same work surely fits."""
    predicted = cells.frame[cells.are_predicted & cells.frame["status"].eq("ok")]
    is_unsure = predicted["predicted_fit"].eq(Fit.UNDECIDED)
    has_sure = (~is_unsure).groupby(work[predicted.index]).transform("any")
    return {*predicted.index[is_unsure & has_sure]}


def _rows_of_faster_ranks(cells: Cells) -> set[int]:
    """Return rows of replayed ranks, except the slowest rank of each cell.

    A real step lasts as long as the step of its slowest rank, so the speeds of the other ranks do not count.
    """
    replayed = cells.frame[cells.are_replayed & cells.frame["tokens_per_s"].notna()]
    if "replay.rank" not in cells.keys or replayed.empty:
        return set()
    keys = ["strategy", "seq_len", *(key for key in cells.keys if key != "replay.rank")]
    slowest = replayed.groupby(keys, dropna=False)["tokens_per_s"].idxmin()
    return {*replayed.index} - {*slowest}


def _bands(cells: Cells) -> dict[int, RateBand]:
    """Return the bands of speeds of predicted and replayed cells, by the row of the cell.

    The band of a replay covers all its processes. A replay is slowest if all of the link's time is exposed,
    and fastest if none is.
    """
    columns = [f"predicted_tokens_per_s{end}" for end in ("_low", "", "_high")]
    known = cells.frame.loc[cells.are_predicted, columns].dropna()
    predicted = {row: RateBand(*ends) for row, *ends in known.itertuples()}
    rates = cells.all_processes.groupby(level=0)[["tokens_per_s_with_link", "tokens_per_s"]]
    low, high = rates.min()["tokens_per_s_with_link"].dropna(), rates.max()["tokens_per_s"]
    expected = cells.frame["tokens_per_s"]
    return predicted | {row: RateBand(low[row], expected[row], high[row]) for row in low.index}


def comparison_lines(comparisons: Sequence[Ranking], *, is_ranked: bool) -> list[str]:
    """Return a line for each comparison.

    A line says which cell led and by how much, or only the speeds where `is_ranked` is false.
    """
    line_of = _ranking_line if is_ranked else _speeds_line
    rest = len(comparisons) - MAX_LINES
    more = [f"{more_label(rest, 'comparison')}; {ALL_IN_CSV}"] if rest > 0 else []
    return [*map(line_of, comparisons[:MAX_LINES]), *more]


def _ranking(seq_len: int, speeds: Sequence[CellSpeed], cells: Cells) -> Ranking:
    """Return the ranking of cells of one length and workload.

    If only some cells have enough processes, and at least two of them, only those are ranked.
    """
    by_name = tuple(sorted(speeds, key=attrgetter("name")))
    first, *others = sorted(speeds, key=attrgetter("tokens_per_s"), reverse=True)
    if not others:
        return Ranking(seq_len, by_name, None, first)
    has_bands = all(cell.band is not None for cell in speeds)
    repeated = [cell for cell in speeds if cell.process_count >= MIN_PROCESSES]
    if 1 < len(repeated) < len(speeds) and (first.is_replayed or not has_bands):
        ranking = _ranking(seq_len, repeated, cells)
        not_repeated = tuple(cell for cell in by_name if cell not in repeated)
        return replace(ranking, cells=by_name, not_repeated=not_repeated)
    counts = {cell.process_count for cell in speeds}
    if first.is_replayed and not has_bands:
        return Ranking(seq_len, by_name, NO_LINK, first)
    if min(counts) < MIN_PROCESSES and (first.is_replayed or not has_bands):
        return Ranking(seq_len, by_name, too_few_processes(counts), first)
    if has_bands:
        return Ranking(seq_len, by_name, None, first, tuple(_band_differences(first, others)))
    processes = cells.processes(first.row)
    lead = tuple((other, speed_difference(processes, cells.processes(other.row))) for other in others)
    undecided = next((speed.undecided for _, speed in lead if speed.undecided), None)
    return Ranking(seq_len, by_name, undecided, first, () if undecided else lead)


def _band_differences(
    first: CellSpeed, others: Sequence[CellSpeed]
) -> Iterator[tuple[CellSpeed, SpeedDifference]]:
    """Yield every other predicted or replayed cell with the speed of the first cell over its speed."""
    for other in others:
        if first.band is not None and other.band is not None:
            compare = band_difference if first.is_replayed else predicted_difference
            yield other, compare(first.band, other.band)


def _speeds_line(ranking: Ranking) -> str:
    """Return `8k: local 21,217; ring (sp 2) 18,971 tokens/s`."""
    speeds = [f"{bracket_settings(cell.name)} {cell.text}" for cell in ranking.cells[:MAX_CELLS]]
    line = f"{_length_and_provenance(ranking)}: {'; '.join(speeds)} tokens/s"
    rest = len(ranking.cells) - MAX_CELLS
    return f"{line}; {more_label(rest, 'cell')} in summary.csv" if rest > 0 else line


def _length_and_provenance(ranking: Ranking) -> str:
    """Return `8k`, `8k, replayed` or `8k, predicted`."""
    provenance = ", predicted" if ranking.is_predicted else ", replayed" if ranking.is_replayed else ""
    return length_label(ranking.seq_len) + provenance


def _ranking_line(ranking: Ranking) -> str:
    """Return `8k: ulysses, 1,234 tokens/s, 1.20 times ring (95 % interval 1.18 to 1.22)`, or the speeds."""
    if ranking.undecided is not None:
        return f"{_speeds_line(ranking)}; undecided: {ranking.undecided}"
    first = ranking.first
    start = f"{_length_and_provenance(ranking)}: {bracket_settings(first.name)}, {first.text} tokens/s"
    if not ranking.lead:
        return f"{start}; no comparable cell"
    if ranking.is_predicted:
        return "; ".join([start, *_predicted_leads(ranking)])
    line = f"{start}, {'; '.join(_ratio_text(*lead) for lead in ranking.lead[:MAX_CELLS])}"
    cells = [f"{bracket_settings(cell.name)} {cell.text}" for cell in ranking.not_repeated[:MAX_CELLS]]
    return f"{line}; too few processes to compare: {', '.join(cells)} tokens/s" if cells else line


def _predicted_leads(ranking: Ranking) -> Iterator[str]:
    """Yield `no clear difference: usp (sp 4)` and `slower: ring (sp 8) by 9.8 %`."""
    level = [bracket_settings(cell.name) for cell, speed in ranking.lead if not speed.is_faster]
    slower = [
        f"{bracket_settings(cell.name)} by {percent_label(1 - 1 / speed.ratio)}"
        for cell, speed in ranking.lead
        if speed.is_faster and speed.ratio
    ]
    for outcome, names in {"no clear difference": level, "slower": slower}.items():
        rest = [more_label(len(names) - MAX_CELLS, "cell")] if len(names) > MAX_CELLS else []
        if names:
            yield f"{outcome}: {', '.join([*names[:MAX_CELLS], *rest])}"


def _ratio_text(other: CellSpeed, speed: SpeedDifference) -> str:
    """Return `1.20 times ring (95 % interval 1.18 to 1.22)`, with the outcome where it is not `faster`."""
    ends = f"{speed.low:.2f} to {speed.high:.2f}"
    bounds = f"95 % interval {ends}" if other.band is None else f"{ends} by both ranges"
    level = f", no difference above {LEVEL_SHARE * 100:.0f} %"
    clear = "" if speed.is_faster else level if speed.is_level else ", no clear difference"
    return f"{speed.ratio:.2f} times {bracket_settings(other.name)} ({bounds}){clear}"
