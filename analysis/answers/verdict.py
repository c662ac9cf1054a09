"""The answer in sentences: which strategy was fastest at which length, what failed, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pandas as pd

from analysis.answers.leaders import Ranking, Timed, bracketed, comparison_lines, rankings
from analysis.answers.no_result import failure_counts, longest_that_fit
from analysis.answers.provenance import observed_lines, replay_lines, unchecked_lines
from analysis.answers.wording import (
    MAX_NAMES,
    lengths_by_name,
    listed,
    listed_lengths,
    listed_places,
    names_at_lengths,
)
from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE
from analysis.cells.difference import LEVEL_SHARE, MODEL_SHARE, NO_LINK
from analysis.labels import count_label, percent_label, signed_percent_label
from bench.common.labels import duration_label
from bench.common.statistics import MIN_PROCESSES, SPARE
from bench.config import AUTO

FASTER, NO_CLEAR_DIFFERENCE = "Faster", "No clear difference"
NO_DIFFERENCE = f"No difference above {LEVEL_SHARE * 100:.0f} %"
REPLAYED_CLEAR = "Most tokens/s in a replay, however much of the link's time is exposed"
REPLAYED_LEVEL = "Not separated by a replay, as ranges overlap"
PREDICTED_CLEAR, PREDICTED_LEVEL = "Predicted fastest", "Predicted fastest, without a clear lead"
UNSTABLE_NOTE = "unstable:"
"""Words that every note on unsteady steps has, also after `very`."""
OUTCOMES = (
    *(FASTER, NO_DIFFERENCE, NO_CLEAR_DIFFERENCE, REPLAYED_CLEAR, REPLAYED_LEVEL),
    *(PREDICTED_CLEAR, PREDICTED_LEVEL),
)
"""Outcomes of comparisons, in the order of the answer."""
SAMPLES: Mapping[str, str] = {"steps": "steps of one process", "repeats": "repeats"}
TO_REPEAT: Mapping[bool, str] = {
    False: f"run one sweep with measure.repeats={MIN_PROCESSES}",
    True: (
        f"start each observed script {MIN_PROCESSES} times, one script after the other, with the same folder"
        " in bench.observe"
    ),
}
"""How cells get more processes, by whether they are observed loops."""
MAX_OTHERS = 3
"""Strategies that one is faster than and that the answer names."""
SHARES: Mapping[str, str] = {
    "all": "communication_transfer_share",
    "exchange": "attention_transfer_share",
    "waiting": "communication_waiting_share",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sentences, each complete by itself."""

    answer: str
    details: list[str]
    """A line for each comparison."""
    unchecked: list[str]
    """What no check reached: steps without a reference, checks that were not made; empty where none is."""
    failures: list[str]
    """One for each status that is not `ok`."""
    fits: list[str]
    """The longest lengths that fit, where any cell ran out of memory."""
    certainty: str
    to_decide: str | None
    """What would decide the comparisons that are undecided, and how long that takes; None without any."""
    caveat: str | None
    """Why strategies are not ranked; None where they are."""
    replayed: list[str] = field(default_factory=list)
    """Sentences about replayed cells; empty where there is none."""
    origins: list[str] = field(default_factory=list)
    """Which records count, and what is kept apart; empty of a sweep of one code, torch and device."""
    shares: list[str] = field(default_factory=list)
    """How much of a step was communication; empty where that is not known."""
    kernels: list[str] = field(default_factory=list)
    """For which kernels there are likely faster ones on these GPUs."""

    @property
    def notes(self) -> list[str]:
        """The sentences that a report shows below the answer and its comparisons."""
        lists = (self.replayed, self.failures, self.fits, self.shares, self.unchecked, [self.certainty])
        lines = [*chain(*lists), *self.origins, *self.kernels, self.to_decide]
        return [line for line in lines if line]


def verdict(cells: Cells, command: Callable[[str], str] | None = None) -> Verdict:
    """Return what these cells say; no comparison leaves its length, work, machine and provenance.

    `command` returns the command that goes on with the sweep with a word about repeats; None where no one
    command can.
    """
    summary = cells.frame
    has_values = ~cells.are_predicted & ~cells.are_replayed
    found, unchecked = rankings(cells), unchecked_lines(summary[has_values])
    has_several = len(summary["strategy"].unique()) > 1 or any(each.is_comparison for each in found)
    is_ranked = cells.caveat is None and has_several
    samples = (_sampled(cells), _banded(summary[cells.are_predicted]))
    answer = _fastest(found) if is_ranked else _ran(cells, is_checked=not unchecked)
    return Verdict(
        answer=" ".join([answer, *observed_lines(cells)]),
        details=comparison_lines(found, is_ranked=cells.caveat is None),
        unchecked=unchecked,
        failures=failure_counts(cells),
        fits=longest_that_fit(cells),
        certainty=" ".join(filter(None, samples)) or "No cell has a timed result.",
        to_decide=_to_decide(found, cells, command),
        caveat=cells.caveat,
        replayed=replay_lines(cells),
        shares=_shares(cells),
    )


def _fastest(found: Sequence[Ranking]) -> str:
    """Who led at which lengths, where there is no clear difference, and where nothing may be said."""
    compared = [ranking for ranking in found if ranking.is_comparison]
    if not compared:
        return "No length has two comparable results, so no strategy is ahead of another."
    places: dict[str, dict[str, set[int]]] = {outcome: {} for outcome in OUTCOMES}
    for ranking in compared:
        if ranking.undecided is None:
            outcome, names = _outcome(ranking)
            places[outcome].setdefault(names, set()).add(ranking.seq_len)
    parts = [f"{outcome}: {_at_lengths(where)}." for outcome, where in places.items() if where]
    for said, is_replayed in {"Undecided": False, "Undecided in a replay": True}.items():
        undecided = _undecided([ranking for ranking in compared if ranking.is_replayed is is_replayed])
        parts += [f"{said}: {undecided}."] if undecided else []
    return " ".join(parts)


def _outcome(ranking: Ranking) -> tuple[str, str]:
    """One of OUTCOMES, and the names that it is said of."""
    first, unbeaten = ranking.first.name, listed(map(bracketed, ranking.unbeaten))
    if ranking.is_predicted:
        return PREDICTED_CLEAR if ranking.is_clear else PREDICTED_LEVEL, first
    if ranking.is_replayed:
        return (REPLAYED_CLEAR, first) if ranking.is_clear else (REPLAYED_LEVEL, unbeaten)
    if not ranking.is_clear:
        return NO_DIFFERENCE if ranking.is_level else NO_CLEAR_DIFFERENCE, unbeaten
    others = [bracketed(other.name) for other, _ in ranking.lead]
    than = listed(others) if len(others) <= MAX_OTHERS else f"all {len(others)} others"
    return FASTER, f"{bracketed(first)} than {than}"


def _at_lengths(places: Mapping[str, set[int]]) -> str:
    """`ring and ulysses at 8k`; of too many names the number of comparisons."""
    if len(places) <= MAX_NAMES:
        return listed_places(places)
    return f"{len(places):,} comparisons at {listed_lengths(set().union(*places.values()))}"


def _undecided(found: Sequence[Ranking]) -> str:
    """`8k and 64k (one process each)`, with whatever stands in the way of an answer; empty without any."""
    lengths: dict[str, set[int]] = {}
    for ranking in found:
        if ranking.undecided is not None:
            lengths.setdefault(ranking.undecided, set()).add(ranking.seq_len)
    return "; ".join(f"{listed_lengths(where)} ({why})" for why, where in lengths.items())


def _to_decide(found: Sequence[Ranking], cells: Cells, command: Callable[[str], str] | None) -> str | None:
    """What it takes, with a command and its minutes where there is one; None where no speeds count."""
    left = [ranking for ranking in found if ranking.undecided not in (None, NO_LINK)]
    undecided = _undecided(left)
    if not undecided or cells.are_synthetic or cells.shares_gpus:
        return None
    asked = cells.frame.get("measure.repeats", pd.Series(dtype=object))  # no loop of a user's own has it
    is_open = bool(len(asked) and asked.eq(AUTO).all())
    start = f"{MIN_PROCESSES} or more interleaved processes of each cell would decide"
    if is_open:
        start = f"{MIN_PROCESSES} or more interleaved processes of the two fastest strategies would decide"
    if cells.caveat is not None:
        start = f"Differences may be chance: {undecided}. {start} on this CPU"
    missing_s = _missing_of_fastest_s(left, cells) if is_open else _missing_s(cells.frame)
    if command is None or not missing_s:
        ways = [TO_REPEAT[is_observed] for is_observed in sorted(cells.are_observed.unique())]
        return f"{start}: {'; '.join(ways)}."
    word = f"measure.repeats={MIN_PROCESSES}"
    if is_open:
        budget_s = SPARE * (missing_s + float((cells.frame["wall_s"] * cells.frame["repeats"]).sum()))
        word = f"measure.repeats_budget_s={math.ceil(budget_s / 100) * 100}"
    return f"{start}; run: {command(word)} (about {duration_label(missing_s)})"


def _missing_s(summary: pd.DataFrame) -> float:
    """Return the seconds of the processes that all cells lack; those without memory are not repeated."""
    missing = (
        (MIN_PROCESSES - summary["repeats"]).clip(lower=0).where(summary["status"] != "out_of_memory", 0)
    )
    return float((missing * summary["wall_s"].astype("float64").fillna(0.0)).sum())


def _missing_of_fastest_s(found: Sequence[Ranking], cells: Cells) -> float:
    """Return the seconds of the processes that the two fastest strategies of each comparison lack.

    `local` comes last: it is the base, and no candidate where others are.
    """

    def order(cell: Timed) -> tuple[bool, float]:
        return bool(cells.frame.loc[cell.row, "strategy"] == BASE), -cell.tokens_per_s

    fastest = [cell.row for ranking in found for cell in sorted(ranking.cells, key=order)[:2]]
    return _missing_s(cells.frame.loc[fastest])


def _ran(cells: Cells, *, is_checked: bool) -> str:
    """Sentences for cells that do not rank strategies: what ran at which lengths, and what was predicted."""
    ok, predicted, replayed = cells.frame["status"] == "ok", cells.are_predicted, cells.are_replayed
    kinds = {
        "Ran and passed every check" if is_checked else "Ran": ok & ~predicted & ~replayed,
        "Replayed": ok & replayed,
        "Predicted": ok & predicted,
    }
    return " ".join(_done(cells, rows, said) for said, rows in kinds.items() if rows.any()) or (
        "No cell has a result."
    )


def _done(cells: Cells, rows: pd.Series[bool], said: str) -> str:
    """`Ran: local at 8k; ring and ulysses at 8k and 64k.`, of some rows."""
    lengths: dict[tuple[int, ...], list[str]] = {}
    pairs = zip(cells.names[rows], cells.frame.loc[rows, "seq_len"], strict=True)
    for name, where in lengths_by_name(pairs).items():
        lengths.setdefault(tuple(sorted(where)), []).append(name)
    parts = [f"{listed(map(bracketed, who))} at {listed_lengths(where)}" for where, who in lengths.items()]
    return f"{said}: {'; '.join(parts)}."


def _cells(cells: pd.DataFrame) -> str:
    return count_label(len(cells), "cell")


def _shares(cells: Cells) -> list[str]:
    """A sentence on communication in the traced steps of cells on several ranks; none where none is known."""
    ran = cells.frame["cluster.world_size"].gt(1) & ~cells.are_predicted
    known = cells.frame.loc[ran & cells.frame["communication_transfer_share"].notna(), [*SHARES.values()]]
    if known.empty:
        return []
    of = {name: _from_to(known[column]) for name, column in SHARES.items()}
    waiting = f", and waiting for another rank {of['waiting']} more" if of["waiting"] else ""
    exchange = of["exchange"] or "an unknown part"
    took = f"Communication that no compute hides took {of['all']} of a traced step"
    return [f"{took} (attention's exchange: {exchange}){waiting}."]


def _from_to(shares: pd.Series[float]) -> str:
    """`0.1 % to 1.7 %`, or one figure where both are equal; empty where none is known."""
    ends = [percent_label(shares.min()), percent_label(shares.max())]
    return " to ".join(filter(None, dict.fromkeys(ends)))


def _banded(predicted: pd.DataFrame) -> str:
    """How wide the bands of predicted speeds are, and what they are not; empty without any."""
    known = predicted[predicted["status"].eq("ok") & predicted["predicted_tokens_per_s"].notna()]
    if known.empty:
        return ""
    expected = known["predicted_tokens_per_s"]
    low = float((known["predicted_tokens_per_s_low"] / expected).min() - 1)
    high = float((known["predicted_tokens_per_s_high"] / expected).max() - 1)
    names = listed(f"hardware={name}" for name in sorted(known["hardware"].dropna().unique()))
    width = f"{signed_percent_label(low)} to {signed_percent_label(high)}"
    return (
        f"How sure: {_cells(known)} predicted by a model with the rates of {names}; nothing ran. Their"
        f" tokens/s may be off by {width}: the band of the model, not a confidence interval. Cells are"
        f" compared at equal rates, and differences below {MODEL_SHARE * 100:.0f} % are called none."
    )


def _sampled(cells: Cells) -> str:
    summary = cells.frame
    timed = summary.loc[summary["n"].notna(), ["n", "n_of", "tokens_per_s_low"]]
    if timed.empty:
        return ""
    parts = []
    for n_of, alike in timed.groupby("n_of"):
        low, high = int(alike["n"].min()), int(alike["n"].max())
        n = str(low) if low == high else f"{low} to {high}"
        parts.append(f"{count_label(len(alike), 'cell')} with n={n} {SAMPLES[str(n_of)]}")
    measured = timed[~cells.are_replayed.loc[timed.index]]
    with_interval = int(measured["tokens_per_s_low"].notna().sum())
    of_median = "95 % interval of the median (which takes at least 6 samples)"
    interval = f"; {with_interval} of {len(measured)} have a {of_median}" if len(measured) else ""
    unstable = summary["n"].notna() & summary["note"].str.contains(UNSTABLE_NOTE, na=False)
    doubt = f"; unstable steps (see the notes): {names_at_lengths(cells, unstable)}" if unstable.any() else ""
    return f"How sure: {listed(parts)}{interval}{doubt}."
