"""Section, checks and verdict of the probe pass: effects of changing single tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, PassFacts, RankReport, is_within

EXPERIMENT = "probe"
"""Only experiment in which the pass runs."""
MODEL = "model"
"""Key of the whole model in `ProbeSection.moved`; the other keys are kinds of layers."""
TOKENS_CHECK, LOSSES_CHECK = "documents and causality", "loss of each position"


class Moved(Struct, frozen=True, kw_only=True):
    """Numbers of positions that moved, that is changed by more than noise, when one token changed.

    They are summed over all changes and ranks.
    """

    other_outputs: int
    """Positions of other documents whose output moved."""
    other_gradients: int
    """Positions of other documents whose input's gradient moved."""
    other_positions: int
    """Compared positions of other documents."""
    earlier_outputs: int
    """Positions before the changed token, in its document, whose output moved."""
    earlier_positions: int
    """Compared positions before the changed token in its document."""
    own_outputs: int
    """Positions from the changed token on, in its document, whose output moved, as it should."""
    own_positions: int
    """Compared positions from the changed token on in its document."""


class ProbeSection(Struct, frozen=True, kw_only=True):
    """Effects of changing single tokens in a cut of the cell's model with the cell's attention."""

    tokens: int
    """Number of tokens of each sequence."""
    documents: int
    """Number of documents in all sequences of one data-parallel rank."""
    changes: int
    """Number of tokens that were changed, one at a time."""
    moved: dict[str, Moved]
    """Moved positions of the whole model, and of each kind of layer run by itself with a changed input."""
    noise: float | None
    """Largest difference between two equal runs. A position has moved if its difference exceeds a multiple
    of the noise."""
    loss_error: float | None
    """Largest difference of a position's loss from float64 on one device, relative to the mean loss."""
    loss_position: int
    """Position, in its sequence, of the token with this largest error."""
    loss_limit: float | None
    """Largest `loss_error` that passes."""


class ProbeFacts(PassFacts[ProbeSection, ProbeSection]):
    name = "probe"
    part_type = ProbeSection
    needs_all_ranks = True
    is_evidence = True

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> ProbeSection:  # noqa: ARG002
        """Return the section of the first rank, which has the sums over all ranks.

        If a position had moved that must not, all ranks would have raised an error before they report.
        """
        return self.parts(reports)[0]

    def checks(self, cell: Cell, section: ProbeSection | None) -> list[Check]:
        """Return the checks of tokens and losses; no checks in another experiment than `probe`."""
        if cell.experiment != EXPERIMENT:
            return []
        tokens, reason = (None, NOT_RUN) if section is None else (section.tokens, None)
        sources = {TOKENS_CHECK: "the same tokens before one changed", LOSSES_CHECK: "float64 on one device"}
        return [
            Check(what=what, against=source, tokens=tokens, reason=reason) for what, source in sources.items()
        ]


def why_wrong(section: ProbeSection) -> str | None:
    """Return a message about positions that moved and must not, or about a wrong loss; None if all is right.

    Kinds of layers come before the whole model.
    """
    for kind, moved in sorted(section.moved.items(), key=lambda item: item[0] == MODEL):
        where = "the whole model" if kind == MODEL else f"layers of {kind}"
        if crossed := crossings(moved):
            return f"probe: after changing one of {section.changes} tokens, {'; '.join(crossed)}, in {where}"
        if moved.own_outputs == 0:
            return f"probe: after changing a token, no output moved in {where}, not even the token's own"
    if not is_within(section.loss_error, section.loss_limit):
        return (
            f"probe: the loss of position {section.loss_position} is off by {section.loss_error:.1e} of the"
            f" mean loss of one device (limit {section.loss_limit:.1e})"
        )
    return None


def crossings(moved: Moved) -> list[str]:
    """Return a phrase with counts for each kind of position that moved and must not."""
    counts = {
        "outputs of other documents moved": (moved.other_outputs, moved.other_positions),
        "input gradients of other documents moved": (moved.other_gradients, moved.other_positions),
        "outputs of earlier tokens moved": (moved.earlier_outputs, moved.earlier_positions),
    }
    return [f"{count:,} of {total:,} {name}" for name, (count, total) in counts.items() if count]


FACTS = ProbeFacts()
