"""The training signal of every step, and the tokens that the ranks saw. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.common.finite import worst
from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, PassFacts, RankReport, by_rank, together

COMPARED = {
    "tokens": "the data",
    "losses and gradient norms": "finite numbers",
    "training signal": "another cell",
}
"""The names of this pass's checks, and with what each compares; of the last, where there is such a cell."""
DIVIDED = 0.5
"""Of the gradient norm: what dividing it once more by two ranks takes away, the least of known mistakes."""
NO_REFERENCE = "no cell of the same work had run before; later ones are compared with this one"


class LossesSection(Struct, frozen=True, kw_only=True):
    """The training signal of every full-length step, equal on all ranks; inspected and traced ones last."""

    loss: Annotated[list[float | None], Meta(min_length=1)]
    """Mean loss per valid token of each step; null where it is not a finite number, as in all lists here."""
    grad_norm: Sequence[float | None]
    valid_tokens: list[int]
    tokens_digest: list[str]
    """By step, a sum over the (position, token, label) that entered the models, which does not depend on how
    the step was sharded."""
    expected_digest: list[str]
    """The same sum from the data, without any sharding."""
    loss_sums: Sequence[Sequence[float | None]]
    """By rank and step, the sum of the rank's own token losses."""
    logged_loss: Sequence[float | None] | None = None
    """By step, the loss that a training stack logs on its main process; null where the loop is ours."""
    logged_max_difference: float | None = None
    """The largest difference of a logged loss from `loss`, which is computed the same for every trainer."""
    compared_with: str | None = None
    """The cell of the same work whose losses and gradient norms these were compared with."""
    compared_steps: int = 0
    """How many steps, from the first, both cells ran."""
    compared_within: dict[str, float] = {}
    """How far the `loss` and the `grad_norm` of the first step were allowed to be apart, relative."""


class LossesFacts(PassFacts[LossesSection, LossesSection]):
    name = "losses"
    part = LossesSection
    workload = "train"
    needs_all_ranks = True
    is_own_work = False
    is_evidence = True

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> LossesSection:  # noqa: ARG002
        parts = self.parts(reports)
        return replace(
            parts[0],
            **together(parts, "loss_sums"),
            grad_norm=[worst(norms) for norms in zip(*by_rank(parts, "grad_norm"), strict=True)],
            logged_max_difference=_off_by(parts[0]),
        )

    def gate(self, cell: Cell, section: LossesSection) -> str | None:  # noqa: ARG002
        """The ranks trained on the step's tokens, each once, at its position, and still train."""
        return _wrong_tokens(section) or _not_finite(section)

    def checks(self, cell: Cell, section: LossesSection | None) -> list[Check]:
        """Tokens, numbers and training signal of every step."""
        if section is None:
            return [Check(what=what, against=against, reason=NOT_RUN) for what, against in COMPARED.items()]
        steps = len(section.loss)
        each = [
            Check(what=what, against=against, tokens=cell.seq_len, steps=steps, of_steps=steps)
            for what, against in COMPARED.items()
        ]
        return [*each[:-1], _held(each[-1], section)]


def _off_by(part: LossesSection) -> float | None:
    if part.logged_loss is None:
        return None
    pairs = zip(part.logged_loss, part.loss, strict=True)
    return max(abs((logged or 0.0) - (loss or 0.0)) for logged, loss in pairs)


def _held(check: Check, losses: LossesSection) -> Check:
    """The last check of COMPARED with the steps that another cell ran too."""
    other, held, steps = losses.compared_with, losses.compared_steps, len(losses.loss)
    if other is None:
        return replace(check, steps=0, compares_training=True, reason=NO_REFERENCE)
    fewer = f"the first {held} steps are compared" if held < steps else None
    limit = losses.compared_within.get("grad_norm", 0.0)
    hidden = None
    if limit >= DIVIDED:
        hidden = f"a division by sp_degree takes {DIVIDED:.0%} of the gradient norm; rounding may {limit:.0%}"
    return replace(
        check, against=f"cell {other}", steps=held, compares_training=True, reason=fewer, below_noise=hidden
    )


def _wrong_tokens(losses: LossesSection) -> str | None:
    digests = zip(losses.tokens_digest, losses.expected_digest, strict=True)
    for step, (seen, expected) in enumerate(digests):
        if seen != expected:
            return (
                f"step {step}: the ranks saw other tokens than the step holds (digest {seen}, expected"
                f" {expected}); some were dropped, repeated or misplaced"
            )
    return None


def _not_finite(losses: LossesSection) -> str | None:
    """The first step and rank whose loss is no number; one step later it is none on any rank."""
    steps = zip(losses.grad_norm, zip(*losses.loss_sums, strict=True), strict=True)
    for step, (norm, sums) in enumerate(steps):
        for rank, loss in enumerate(sums):
            if loss is None or not math.isfinite(loss):
                return f"losses: the loss of step {step} on rank {rank} is {loss}"
        if norm is None or not 0 <= norm < math.inf:
            return f"losses: the gradient norm of step {step} is {norm}"
    return None


FACTS = LossesFacts()
