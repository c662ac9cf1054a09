"""What tokens a model was fed in a step, by rank, and whether that is a sequence, shared. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.attention.layouts import LAYOUTS
from bench.config import OWN
from bench.observation.objective import RankObjective
from bench.passes.facts import RankReport

StepSize = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTokens:
    """One rank's part of a step's first micro-step."""

    group: Sequence[int]
    """The ranks that share its sequences."""
    place: int
    """This rank's in the group."""
    batch: int
    length: int
    micro_steps: int
    digest: str
    """Tells different token ids apart."""
    positions: Sequence[int] | None
    """Those of its first sequence; None where the model was given none and counts from 0."""
    model_shifts_labels: bool
    """Whether the model was given plain labels, which it shifts within the shard."""

    @property
    def size(self) -> StepSize:
        """Sequences, tokens of a shard and calls of the model in a step."""
        return self.batch, self.length, self.micro_steps


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What one rank of an observed loop has to say."""

    report: RankReport
    tokens: RankTokens
    """What it was fed in the last step that was looked at."""
    sizes: Sequence[StepSize]
    """Of every step that was looked at."""
    other_layers: Sequence[str]
    """What of the model is not plain causal attention, each in a few words."""
    objective: RankObjective
    """What the step trained on whose attention was compared."""
    stated_not_finite: tuple[int, str] | None
    """The first step in which its loop stated a number that is not finite, and that in one line."""


def misfed(ranks: Sequence[RankTokens]) -> str | None:
    """What is wrong with the tokens of the ranks that share a sequence, in one line, or None."""
    if len(ranks) == 1:
        return None
    first, sharers = ranks[0], f"ranks {', '.join(map(str, ranks[0].group))}"
    if len({each.digest for each in ranks}) == 1:
        return (
            f"{sharers} share a sequence, but all were fed the same {first.length:,} tokens: give"
            " each its shard"
        )
    if any(each.positions is None for each in ranks):
        return (
            f"{sharers} share a sequence, but without position_ids each counts its positions from"
            " 0: give each the positions of its shard"
        )
    if len({tuple(positions_of(each)) for each in ranks}) == 1 and not is_packed([first]):
        return (
            f"{sharers} share a sequence, but all were given the same positions: give each those"
            " of its own shard"
        )
    if any(each.model_shifts_labels for each in ranks):
        return (
            "labels were shifted after sharding: the model shifts them within a shard, so the last token of"
            " each shard is not trained on; shift whole sequences, and hand over shift_labels"
        )
    return None if is_packed(ranks) else _uncovered(ranks, sharers)


def positions_of(rank: RankTokens) -> Sequence[int]:
    """The positions of a rank's first sequence."""
    return range(rank.length) if rank.positions is None else rank.positions


def seq_len(rank: RankTokens) -> int:
    """Tokens of one whole sequence, of which ranks hold equal parts."""
    return rank.length * len(rank.group)


def is_packed(ranks: Sequence[RankTokens]) -> bool:
    """Whether positions start anew within a sequence, as those of several documents do."""
    return sum(position == 0 for each in ranks for position in positions_of(each)) > 1


def layout_of(ranks: Sequence[RankTokens]) -> str:
    """The layout that deals a sequence out like this, as far as these ranks tell; `own` for none of ours."""
    whole, degree = seq_len(ranks[0]), len(ranks[0].group)
    fits = (name for name, layout in LAYOUTS.items() if whole % layout.length_multiple(degree) == 0)
    return next((name for name in fits if all(_is_dealt(each, name) for each in ranks)), OWN)


def _is_dealt(rank: RankTokens, layout: str) -> bool:
    whole = range(seq_len(rank))
    pieces = LAYOUTS[layout].slices(len(whole), len(rank.group), rank.place)
    return [*positions_of(rank)] == [position for piece in pieces for position in whole[piece]]


def _uncovered(ranks: Sequence[RankTokens], sharers: str) -> str | None:
    """Positions that no rank holds, or several do."""
    held = sorted(position for each in ranks for position in positions_of(each))
    if held == [*range(len(held))]:
        return None
    wrong = next(place for place, position in enumerate(held) if place != position)
    return (
        f"{sharers} hold {len(held):,} tokens of a sequence, but position {wrong} is missing or"
        " held twice; give each position to exactly one rank"
    )
