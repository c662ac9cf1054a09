"""States the answer: which strategy was fastest at which length, what failed, and how sure the answer is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pandas as pd

from analysis.answers.kernels import kernel_lines
from analysis.answers.leaders import CellSpeed, Ranking, comparison_lines, rankings
from analysis.answers.no_result import failure_counts, longest_that_fit
from analysis.answers.provenance import observed_lines, replay_lines, unchecked_lines
from analysis.answers.wording import (
    MAX_NAMES,
    bracket_settings,
    join_lengths,
    join_words,
    lengths_by_name,
    names_at_lengths,
)
from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE_STRATEGY
from analysis.cells.difference import LEVEL_SHARE, MODEL_SHARE, NO_LINK
from analysis.labels import count_label, percent_label, signed_percent_label
from bench.common.labels import duration_label
from bench.common.statistics import MIN_PROCESSES, TIME_MARGIN
from bench.config import AUTO


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the comparison of the cells of one length, as a sentence."""

    title: str
    """Title of a number of comparisons that have too many names for a sentence."""
    claim: str
    """Beginning of the sentence, with places for `first`, `others` and `unbeaten`."""
    remark: str = ""
    """End of the sentence, after the lengths."""


FASTER = Outcome("Faster", "{first} is faster than {others}")
NO_DIFFERENCE = Outcome(
    f"No difference above {LEVEL_SHARE * 100:.0f} %",
    f"{{unbeaten}} differ by less than {LEVEL_SHARE * 100:.0f} %",
)
NO_CLEAR_DIFFERENCE = Outcome("No clear difference", "{unbeaten} show no clear difference")
REPLAYED_CLEAR = Outcome(
    "Most tokens/s in a replay",
    "{first} has the most tokens/s in a replay",
    ", however much of the link's time is exposed",
)
REPLAYED_LEVEL = Outcome(
    "Not separated by a replay", "A replay does not separate {unbeaten}", ", because their ranges overlap"
)
PREDICTED_CLEAR = Outcome("Predicted fastest", "{first} is predicted to be the fastest")
PREDICTED_LEVEL = Outcome(
    "Predicted fastest, without a clear lead",
    "{first} is predicted to be the fastest",
    ", without a clear lead",
)
OUTCOMES = (
    *(FASTER, NO_DIFFERENCE, NO_CLEAR_DIFFERENCE, REPLAYED_CLEAR, REPLAYED_LEVEL),
    *(PREDICTED_CLEAR, PREDICTED_LEVEL),
)
"""Outcomes of comparisons, in the order of the answer."""
UNSTABLE_NOTE = "unstable:"
"""Text in every note on unsteady steps: `unstable: ...` or `very unstable: ...`."""
TO_REPEAT: Mapping[bool, str] = {
    False: f"run one sweep with measure.repeats={MIN_PROCESSES}",
    True: (
        f"start each observed script {MIN_PROCESSES} times, one script after the other, with the same folder"
        " in bench.observe"
    ),
}
"""Ways to get more processes of a cell, by whether the cell is an observed loop."""
MAX_OTHERS = 3
"""Largest number of slower strategies that the answer names."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of a sweep in sentences, each complete by itself."""

    answer: str
    details: list[str]
    """A line for each comparison."""
    unchecked: list[str]
    """Sentences on steps and checks that were left out; empty where everything was checked."""
    failures: list[str]
    """A sentence for each status other than `ok`."""
    fits: list[str]
    """Sentences on the longest lengths that fit in memory, or that no cell ran out of memory."""
    certainty: str
    to_decide: str | None
    """Next step and time that would decide the undecided comparisons; None without any."""
    caveat: str | None
    """Reason why strategies are not ranked; None where they are."""
    replayed: list[str] = field(default_factory=list)
    """Sentences about replayed cells; empty without any."""
    origins: list[str] = field(default_factory=list)
    """Sentences on records of different code, torch or device; empty where all have the same."""
    shares: list[str] = field(default_factory=list)
    """Sentence on the share of a step that communication took; empty where no share is known."""
    kernels: list[str] = field(default_factory=list)
    """Lines on strategies that ran on different kernels, or on a stand-in for flash-attn."""

    @property
    def notes(self) -> list[str]:
        """The sentences that a report shows below the answer and its comparisons."""
        lists = (self.replayed, self.failures, self.fits, self.shares, self.unchecked, [self.certainty])
        lines = [*chain(*lists), *self.origins, *self.kernels, self.to_decide]
        return [line for line in lines if line]


def verdict(cells: Cells, command: Callable[[str], str] | None = None) -> Verdict:
    """Return the answer of a report on these cells, in sentences.

    Only cells of the same length, workload, machine and provenance are compared with each other.

    Args:
        cells: cells of one or several sweeps.
        command: function from an option on repeats to the command that continues the sweep with it; None
            where no single command can.
    """
    summary = cells.frame
    is_measured = ~cells.are_predicted & ~cells.are_replayed
    ranked, unchecked = rankings(cells), unchecked_lines(summary[is_measured])
    has_several = len(summary["strategy"].unique()) > 1 or any(ranking.is_comparison for ranking in ranked)
    is_ranked = cells.caveat is None and has_several
    certainty = (_sample_sentences(cells), _band_sentences(summary[cells.are_predicted]))
    answer = _fastest_sentences(ranked) if is_ranked else _ran_sentences(cells, is_checked=not unchecked)
    return Verdict(
        answer=" ".join([answer, *observed_lines(cells)]),
        details=comparison_lines(ranked, is_ranked=cells.caveat is None),
        unchecked=unchecked,
        failures=failure_counts(cells),
        fits=longest_that_fit(cells),
        certainty=" ".join(filter(None, certainty)) or "No cell has a timed result.",
        to_decide=_to_decide(ranked, cells, command),
        caveat=cells.caveat,
        replayed=replay_lines(cells),
        shares=_share_sentences(cells),
        kernels=kernel_lines(cells),
    )


def _fastest_sentences(ranked: Sequence[Ranking]) -> str:
    """Return sentences on which strategies led at which lengths, and at which lengths nothing is decided."""
    compared = [ranking for ranking in ranked if ranking.is_comparison]
    if not compared:
        return "No length has two comparable results, so no strategy is ahead of another."
    lengths: dict[Outcome, dict[str, set[int]]] = {outcome: {} for outcome in OUTCOMES}
    for ranking in compared:
        if ranking.undecided is None:
            outcome = _outcome(ranking)
            lengths[outcome].setdefault(_claim(outcome, ranking), set()).add(ranking.seq_len)
    sentences = [*chain.from_iterable(_outcome_sentences(outcome, lengths[outcome]) for outcome in OUTCOMES)]
    for noun, is_replayed in {"Comparisons": False, "Comparisons of replays": True}.items():
        undecided = _undecided_lengths(
            [ranking for ranking in compared if ranking.is_replayed is is_replayed]
        )
        sentences += [f"{noun} are undecided at {undecided}."] if undecided else []
    return " ".join(sentences)


def _outcome(ranking: Ranking) -> Outcome:
    """Return the outcome of a comparison that is not undecided."""
    if ranking.is_predicted:
        return PREDICTED_CLEAR if ranking.is_clear else PREDICTED_LEVEL
    if ranking.is_replayed:
        return REPLAYED_CLEAR if ranking.is_clear else REPLAYED_LEVEL
    if ranking.is_clear:
        return FASTER
    return NO_DIFFERENCE if ranking.is_level else NO_CLEAR_DIFFERENCE


def _claim(outcome: Outcome, ranking: Ranking) -> str:
    """Return the beginning of the outcome's sentence with the names of the ranked cells."""
    others = [bracket_settings(other.name) for other, _ in ranking.lead]
    return outcome.claim.format(
        first=bracket_settings(ranking.first.name),
        others=join_words(others) if len(others) <= MAX_OTHERS else f"all {len(others)} others",
        unbeaten=join_words(map(bracket_settings, ranking.unbeaten)),
    )


def _outcome_sentences(outcome: Outcome, lengths_of_claim: Mapping[str, set[int]]) -> list[str]:
    """Return a sentence for each claim; if there are too many, one sentence with their number."""
    if len(lengths_of_claim) <= MAX_NAMES:
        return [
            f"{claim} at {join_lengths(lengths)}{outcome.remark}."
            for claim, lengths in lengths_of_claim.items()
        ]
    lengths = join_lengths(set().union(*lengths_of_claim.values()))
    return [f"{outcome.title}: {len(lengths_of_claim):,} comparisons at {lengths}."]


def _undecided_lengths(ranked: Sequence[Ranking]) -> str:
    """Return `8k and 64k (one process each)`, the lengths with the reason; empty without any."""
    lengths: dict[str, set[int]] = {}
    for ranking in ranked:
        if ranking.undecided is not None:
            lengths.setdefault(ranking.undecided, set()).add(ranking.seq_len)
    return " and at ".join(f"{join_lengths(at)} ({reason})" for reason, at in lengths.items())


def _to_decide(ranked: Sequence[Ranking], cells: Cells, command: Callable[[str], str] | None) -> str | None:
    """Return a sentence on what would decide the undecided comparisons, with a command if there is one.

    None where nothing is undecided, or where speeds mean nothing: for synthetic cells, and where ranks share
    a GPU.
    """
    undecided = [ranking for ranking in ranked if ranking.undecided not in (None, NO_LINK)]
    lengths = _undecided_lengths(undecided)
    if not lengths or cells.has_synthetic or cells.shares_gpus:
        return None
    repeats = cells.frame.get("measure.repeats", pd.Series(dtype=object))  # a user's own loop has none
    is_auto = bool(len(repeats) and repeats.eq(AUTO).all())
    needed = "the two fastest strategies" if is_auto else "each cell"
    start = f"A decision needs {MIN_PROCESSES} or more interleaved processes of {needed}"
    if cells.caveat is not None:
        start = f"Differences may be chance at {lengths}. {start}, and holds for this CPU only"
    missing_s = _missing_of_fastest_s(undecided, cells) if is_auto else _missing_s(cells.frame)
    if command is None or not missing_s:
        ways = [TO_REPEAT[is_observed] for is_observed in sorted(cells.are_observed.unique())]
        return f"{start}: {'; '.join(ways)}."
    option = f"measure.repeats={MIN_PROCESSES}"
    if is_auto:
        budget_s = TIME_MARGIN * (missing_s + float((cells.frame["wall_s"] * cells.frame["repeats"]).sum()))
        option = f"measure.repeats_budget_s={math.ceil(budget_s / 100) * 100}"
    return f"{start}. Run: {command(option)} (about {duration_label(missing_s)})"


def _missing_s(summary: pd.DataFrame) -> float:
    """Return the seconds that cells need to reach MIN_PROCESSES; cells out of memory are not repeated."""
    missing = (
        (MIN_PROCESSES - summary["repeats"]).clip(lower=0).where(summary["status"] != "out_of_memory", 0)
    )
    return float((missing * summary["wall_s"].astype("float64").fillna(0.0)).sum())


def _missing_of_fastest_s(ranked: Sequence[Ranking], cells: Cells) -> float:
    """Return the seconds that the two fastest cells of each comparison need to reach MIN_PROCESSES.

    `local` counts as slowest, because it is the base of other strategies and not a candidate.
    """

    def order(cell: CellSpeed) -> tuple[bool, float]:
        return bool(cells.frame.loc[cell.row, "strategy"] == BASE_STRATEGY), -cell.tokens_per_s

    fastest = [cell.row for ranking in ranked for cell in sorted(ranking.cells, key=order)[:2]]
    return _missing_s(cells.frame.loc[fastest])


def _ran_sentences(cells: Cells, *, is_checked: bool) -> str:
    """Return sentences on which cells ran, were replayed or were predicted at which lengths, unranked."""
    ok, predicted, replayed = cells.frame["status"] == "ok", cells.are_predicted, cells.are_replayed
    rows_of_claim = {
        "{} ran and passed every check" if is_checked else "{} ran": ok & ~predicted & ~replayed,
        "{} ran as a replay": ok & replayed,
        "A prediction exists for {}": ok & predicted,
    }
    sentences = [_claim_at_lengths(claim, cells, rows) for claim, rows in rows_of_claim.items() if rows.any()]
    return " ".join(sentences) or "No cell has a result."


def _claim_at_lengths(claim: str, cells: Cells, rows: pd.Series[bool]) -> str:
    """Return a claim as a sentence: `local ran at 8k; ring and ulysses ran at 8k and 64k.`."""
    names_of_lengths: dict[tuple[int, ...], list[str]] = {}
    pairs = zip(cells.names[rows], cells.frame.loc[rows, "seq_len"], strict=True)
    for name, lengths in lengths_by_name(pairs).items():
        names_of_lengths.setdefault(tuple(sorted(lengths)), []).append(name)
    parts = (
        f"{claim.format(join_words(names))} at {join_lengths(lengths)}"
        for lengths, names in names_of_lengths.items()
    )
    return f"{'; '.join(parts)}."


def _share_sentences(cells: Cells) -> list[str]:
    """Return sentences on the transfer and waiting of cells on several ranks; none if no share is known.

    A share is a cell's median over its traced steps; the sentences give the range over the cells.
    """
    ran = cells.frame["cluster.world_size"].gt(1) & ~cells.are_predicted
    known = cells.frame[ran & cells.frame["communication_transfer_share"].notna()]
    if known.empty:
        return []
    transfer, attention, waiting = (
        _percent_range(known[f"{share}_share"])
        for share in ("communication_transfer", "attention_transfer", "communication_waiting")
    )
    part = f"took {attention}" if attention else "is unknown"
    sentence = (
        f"Communication that no compute hides took {transfer} of a traced step; attention's part, the column"
        f" transfer, {part}."
    )
    return [f"{sentence} Waiting for other ranks took a further {waiting}." if waiting else sentence]


def _percent_range(shares: pd.Series[float]) -> str:
    """Return `0.1 % to 1.7 %`, or one number where all shares are equal; empty where none is known."""
    ends = [percent_label(shares.min()), percent_label(shares.max())]
    return " to ".join(filter(None, dict.fromkeys(ends)))


def _band_sentences(predicted: pd.DataFrame) -> str:
    """Return sentences on the width and meaning of the bands of predicted speeds; empty without any."""
    known = predicted[predicted["status"].eq("ok") & predicted["predicted_tokens_per_s"].notna()]
    if known.empty:
        return ""
    expected = known["predicted_tokens_per_s"]
    low = float((known["predicted_tokens_per_s_low"] / expected).min() - 1)
    high = float((known["predicted_tokens_per_s_high"] / expected).max() - 1)
    names = join_words(f"hardware={name}" for name in sorted(known["hardware"].dropna().unique()))
    width = f"{signed_percent_label(low)} to {signed_percent_label(high)}"
    return (
        f"Confidence: a model predicted {count_label(len(known), 'cell')} with the rates of {names}; nothing"
        f" ran. Real tokens/s may differ by {width}: the band of the model, not a confidence interval."
        f" Cells are compared at equal rates, and differences below {MODEL_SHARE * 100:.0f} % do not count."
    )


def _sample_sentences(cells: Cells) -> str:
    """Return sentences on samples and intervals of speeds, and on unsteady steps; empty without speeds."""
    summary = cells.frame
    timed = summary.loc[summary["n"].notna(), ["n", "n_of", "tokens_per_s_low"]]
    if timed.empty:
        return ""
    runs = [_runs_text(str(n_of), group["n"]) for n_of, group in timed.groupby("n_of")]
    sentences = [f"Confidence: {join_words(runs)}."]
    measured = timed[~cells.are_replayed.loc[timed.index]]
    if len(measured):
        sentences.append(_interval_sentence(measured))
    unstable = summary["n"].notna() & summary["note"].str.contains(UNSTABLE_NOTE, na=False)
    if unstable.any():
        sentences.append(
            f"The step times of {names_at_lengths(cells, unstable)} are unstable; see the notes."
        )
    return " ".join(sentences)


def _runs_text(n_of: str, n: pd.Series[float]) -> str:
    """Return `2 cells ran once, with 1 to 20 timed steps` or `3 cells ran 2 to 6 times`."""
    low, high = int(n.min()), int(n.max())
    numbers = str(low) if low == high else f"{low} to {high}"
    cells = count_label(len(n), "cell")
    if n_of == "repeats":
        return f"{cells} ran {numbers} times"
    return f"{cells} ran once, with {numbers} timed {'step' if high == 1 else 'steps'}"


def _interval_sentence(measured: pd.DataFrame) -> str:
    """Return a sentence on how many measured cells have a 95 % interval of their median."""
    names = {"steps": "timed steps", "repeats": "runs"}
    samples = " or ".join(name for n_of, name in names.items() if n_of in {*measured["n_of"]})
    cells, count = count_label(len(measured), "cell"), int(measured["tokens_per_s_low"].notna().sum())
    if not count:
        return f"No cell has the six {samples} that a 95 % interval of the median needs."
    have = "has" if count == 1 else "have"
    return f"{count} of {cells} {have} six or more {samples} and therefore a 95 % interval of the median."
