"""Which tokens see which: what moves when one token changes, and each position's loss. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, PassFacts, RankReport, is_within

EXPERIMENT = "probe"
"""The pass runs only in this one."""
MODEL = "model"
"""The part that is the whole model; the others are kinds of layers."""
OF_TOKENS, OF_LOSSES = "documents and causality", "loss of each position"


class Moved(Struct, frozen=True, kw_only=True):
    """Positions that one token's change moved, added up over all changes and all ranks."""

    other_outputs: int
    """In other documents: an output of theirs."""
    other_gradients: int
    """In other documents: the gradient of an input of theirs."""
    other_positions: int
    """How many positions of other documents were looked at."""
    earlier_outputs: int
    """In the same document, before the token: an output."""
    earlier_positions: int
    own_outputs: int
    """In the same document, at the token and after it: an output, as it should be."""
    own_positions: int


class ProbeSection(Struct, frozen=True, kw_only=True):
    """One token after another was changed, in a cut of the cell's model on the cell's own attention."""

    tokens: int
    """Of each sequence."""
    documents: int
    """Of all sequences of one data-parallel rank."""
    changes: int
    """How many tokens were changed, one at a time."""
    moved: dict[str, Moved]
    """Of the whole model, and of each kind of layer by itself: there the layer's input is changed."""
    noise: float | None
    """The largest difference between two equal runs; at 0 every difference counts, else those beyond it."""
    loss_error: float | None
    """The largest error of a position's loss against one device in float64, relative to the mean loss."""
    loss_position: int
    """Where that is, in its sequence."""
    loss_limit: float | None


class ProbeFacts(PassFacts[ProbeSection, ProbeSection]):
    name = "probe"
    part = ProbeSection
    needs_all_ranks = True
    is_evidence = True

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> ProbeSection:  # noqa: ARG002
        """The ranks have added up their counts already; where something crossed they stopped there."""
        return self.parts(reports)[0]

    def checks(self, cell: Cell, section: ProbeSection | None) -> list[Check]:
        """In experiment=probe alone."""
        if cell.experiment != EXPERIMENT:
            return []
        tokens, reason = (None, NOT_RUN) if section is None else (section.tokens, None)
        against = {OF_TOKENS: "the same tokens before one changed", OF_LOSSES: "float64 on one device"}
        return [
            Check(what=what, against=other, tokens=tokens, reason=reason) for what, other in against.items()
        ]


def why_wrong(section: ProbeSection) -> str | None:
    """What should not have moved and did, of the kinds of layers first; None where all is right."""
    for kind, moved in sorted(section.moved.items(), key=lambda item: item[0] == MODEL):
        crossed = crossings(moved)
        if crossed:
            return (
                f"probe: one token changed, {section.changes} times: {'; '.join(crossed)}, in"
                f" {'the whole model' if kind == MODEL else f'layers of {kind}'}"
            )
        if moved.own_outputs == 0:
            return f"probe: one token changed, and no output of {kind} moved, not even its own"
    if not is_within(section.loss_error, section.loss_limit):
        return (
            f"probe: the loss of position {section.loss_position} is off one device's by"
            f" {section.loss_error:.1e} of the mean (limit {section.loss_limit:.1e})"
        )
    return None


def crossings(moved: Moved) -> list[str]:
    """What crossed, each with its count; empty where nothing did."""
    counts = {
        "outputs of other documents moved": (moved.other_outputs, moved.other_positions),
        "input gradients of other documents moved": (moved.other_gradients, moved.other_positions),
        "outputs of earlier tokens moved": (moved.earlier_outputs, moved.earlier_positions),
    }
    return [f"{count:,} of {of:,} {what}" for what, (count, of) in counts.items() if count]


FACTS = ProbeFacts()
