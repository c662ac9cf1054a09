"""Section, gate and checks of the losses pass: training signal and tokens of every step. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.common.finite import largest_error
from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, PassFacts, RankReport, field_by_rank, join_by_rank

COMPARED = {
    "tokens": "the data",
    "losses and gradient norms": "finite numbers",
    "training signal": "another cell",
    "every gradient at full length": "another cell",
    "gradients of the first steps": "another cell",
    "loss by position": "another cell",
}
"""Names of this pass's checks, each with the source of the values that it compares with."""
DIVISION_EFFECT = 0.5
"""Relative change of the gradient norm if gradients are once more divided by sp_degree = 2. No other known
mistake has a smaller effect."""
NO_LOGITS = "the model returned neither logits nor log-probabilities of the labels"
NO_REFERENCE = "no cell with the same workload ran before this one; later cells are compared with it"


ONE_RANK_EFFECT = 0.4
"""Typical relative change of a gradient that holds the first half of the tokens alone. In 304 gradients of
four models at 2,048 tokens it was 0.19 to 1.22, with medians of 0.38 to 0.70."""
PARTS = 16
"""Number of equal parts of a sequence whose losses are recorded."""
BOUNDARIES = 96
"""Number of positions at which shards may end: the last one of each 96th of a sequence.

Shards of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 and 96 ranks end there, also in two pieces each (zigzag)."""
BOUNDARY_EFFECT = 1 / BOUNDARIES
"""Relative change of the loss at 96 boundary positions if the loss of one of them doubles."""
SIGNED_SUMS = 8
"""Number of sums with random signs over the elements of a parameter's gradient."""


def kind_of(parameter: str) -> str:
    """Return a parameter's name within its layer, such as `mlp.up_proj.weight` of `model.layers.3`."""
    return parameter.rpartition(".layers.")[2].lstrip("0123456789.").removeprefix("model.")


class GradientMatch(Struct, frozen=True, kw_only=True):
    """Comparison of every gradient of the first full-length step, or of every first moment, of two cells."""

    parameters: int
    below_noise: int
    """Number of parameters whose limit is at least ONE_RANK_EFFECT."""
    parameter: str
    """Parameter whose gradient is nearest to its limit."""
    difference: float | None
    """Length of the difference over that of the other gradient; null if a cell has no such gradient."""
    limit: float
    steps: int = 1
    """Number of full-length steps in the compared first moments; 1 for gradients."""

    @property
    def is_within(self) -> bool:
        return self.difference is not None and self.difference <= self.limit


class LossByPosition(Struct, frozen=True, kw_only=True):
    """Mean token losses in parts of the sequence, in the first full-length step, over all ranks."""

    loss: Annotated[list[float | None], Meta(min_length=1)]
    """Mean loss in each of 16 equal parts; null for a part without valid labels."""
    boundary_loss: float | None
    """Mean loss at positions where shards may end: the last position of each 96th of the sequence. Null with
    padding and packed documents, as shards then end elsewhere."""
    valid_tokens: list[int]
    """Number of valid labels in each part of the sequence, and at the end that of the boundary positions."""


class PositionMatch(Struct, frozen=True, kw_only=True):
    """Comparison of `LossByPosition` with that of another cell."""

    part: int | None
    """Part nearest to its limit, from 0; null for the boundary positions."""
    value: float | None
    reference: float | None
    difference: float | None
    """Difference of the two losses, relative to that of the other cell or to its mean over the sequence,
    whichever is larger; null if only one cell has a loss."""
    limit: float

    @property
    def is_within(self) -> bool:
        return self.difference is not None and self.difference <= self.limit


class FirstMoment(Struct, frozen=True, kw_only=True):
    """Sums over the optimizer's first moment, which is linear in the gradients of all steps so far."""

    steps: int
    sums: Mapping[str, Sequence[float | None]]
    """SIGNED_SUMS sums over the elements of each parameter's moment, with random signs."""


class LossesSection(Struct, frozen=True, kw_only=True):
    """Training signal of every full-length step, equal on all ranks; inspected and traced steps come last."""

    loss: Annotated[list[float | None], Meta(min_length=1)]
    """Mean loss per valid token of each step. Numbers that are not finite are null."""
    grad_norm: Sequence[float | None]
    """Norm of the whole gradient of each step before clipping, the worst of all ranks."""
    valid_tokens: list[int]
    """Number of tokens of each step, over all ranks, whose labels count."""
    tokens_digest: list[str]
    """Digest by step of the (position, token, label) triples that entered the models, summed over ranks so
    that it does not depend on the sharding."""
    expected_digest: list[str]
    """Digest by step of the unsharded data, to which `tokens_digest` has to be equal."""
    loss_sums: Sequence[Sequence[float | None]]
    """Sum of a rank's own token losses, by rank and step."""
    logged_loss: Sequence[float | None] | None = None
    """Loss of each step as a training stack logs it on its main process; null for `trainer=native`."""
    logged_max_difference: float | None = None
    """Largest difference between a logged loss and `loss`; null without logged losses."""
    gradients: Mapping[str, Sequence[float | None]] = {}
    """SIGNED_SUMS sums over the elements, with random signs, of each parameter's gradient in the first
    full-length step, after clipping."""
    moment: FirstMoment | None = None
    """First moment of the optimizer after four full-length steps, or after the last timed step if fewer ran;
    null after a single step, whose gradient is in `gradients`."""
    by_position: LossByPosition | None = None
    compared_with: str | None = None
    """Cell with the same workload that these losses were compared with; null without one."""
    compared_steps: int = 0
    compared_within: dict[str, float] = {}
    """Relative limits of the difference in the first step, by `loss` and `grad_norm`."""
    gradient_match: GradientMatch | None = None
    moment_match: GradientMatch | None = None
    position_match: PositionMatch | None = None


class LossesFacts(PassFacts[LossesSection, LossesSection]):
    name = "losses"
    part_type = LossesSection
    workload = "train"
    needs_all_ranks = True
    is_own_work = False
    is_evidence = True

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> LossesSection:  # noqa: ARG002
        parts = self.parts(reports)
        return replace(
            parts[0],
            **join_by_rank(parts, "loss_sums"),
            grad_norm=[
                largest_error(norms) for norms in zip(*field_by_rank(parts, "grad_norm"), strict=True)
            ],
            logged_max_difference=_logged_max_difference(parts[0]),
        )

    def gate(self, cell: Cell, section: LossesSection) -> str | None:  # noqa: ARG002
        """Return a message if not every token was trained on once, or a loss or norm is not finite."""
        return _why_tokens_are_wrong(section) or _why_numbers_are_wrong(section)

    def checks(self, cell: Cell, section: LossesSection | None) -> list[Check]:
        """Return the checks of tokens, finite numbers and training signal."""
        if section is None:
            return [Check(what=what, against=against, reason=NOT_RUN) for what, against in COMPARED.items()]
        steps = len(section.loss)
        checks = [
            Check(what=what, against=against, tokens=cell.seq_len, steps=steps, of_steps=steps)
            for what, against in COMPARED.items()
        ]
        *checks, signal, gradients, moments, positions = checks
        return [
            *checks,
            _training_signal_check(signal, section),
            _gradients_check(gradients, section),
            *_moment_check(moments, section),
            _positions_check(positions, section),
        ]


def _logged_max_difference(part: LossesSection) -> float | None:
    if part.logged_loss is None:
        return None
    pairs = zip(part.logged_loss, part.loss, strict=True)
    return max(abs((logged or 0.0) - (loss or 0.0)) for logged, loss in pairs)


def _training_signal_check(check: Check, losses: LossesSection) -> Check:
    """Return `check` with the number of steps that were compared with the reference.

    It is `below_noise` if rounding could hide a gradient that was divided by sp_degree once too often, and
    has a `reason` if no step, or not every step, was compared.
    """
    if losses.compared_with is None:
        return replace(check, steps=0, compares_training=True, reason=NO_REFERENCE)
    steps, reason, hidden_mistake = losses.compared_steps, None, None
    if steps < len(losses.loss):
        reason = f"the first {steps} steps are compared"
    limit = losses.compared_within.get("grad_norm", 0.0)
    if limit >= DIVISION_EFFECT:
        hidden_mistake = (
            f"dividing by sp_degree would lower the gradient norm by {DIVISION_EFFECT:.0%};"
            f" rounding may change it by {limit:.0%}"
        )
    return replace(
        check,
        against=f"cell {losses.compared_with}",
        steps=steps,
        compares_training=True,
        reason=reason,
        below_noise=hidden_mistake,
    )


def _gradients_check(check: Check, losses: LossesSection) -> Check:
    """Return `check` for the first full-length step, with a `reason` if no gradient was compared.

    It is `below_noise` if rounding could hide a gradient of one rank's tokens alone.
    """
    check, match = replace(check, steps=0, compares_training=True), losses.gradient_match
    if losses.compared_with is None or match is None:
        return replace(check, reason=NO_REFERENCE)
    against = f"cell {losses.compared_with}"
    return replace(check, against=against, steps=1, below_noise=_hidden_mistake(match))


def _moment_check(check: Check, losses: LossesSection) -> list[Check]:
    """Return the check of the first steps; none after a single step, whose gradients are compared already."""
    match, moment = losses.moment_match, losses.moment
    if moment is None:
        return []
    check = replace(check, steps=0, of_steps=moment.steps, compares_training=True)
    if losses.compared_with is None:
        return [replace(check, reason=NO_REFERENCE)]
    check = replace(check, against=f"cell {losses.compared_with}")
    if match is None:
        return [
            replace(
                check, of_steps=None, reason=f"the other cell ran fewer or more than {moment.steps} steps"
            )
        ]
    return [replace(check, steps=match.steps, below_noise=_hidden_mistake(match))]


def _hidden_mistake(match: GradientMatch) -> str | None:
    """Return a message about gradients in which rounding could hide those of one rank's tokens, or None."""
    if not match.below_noise:
        return None
    return (
        f"tokens of one rank alone would change a gradient by some {ONE_RANK_EFFECT:.0%}; rounding may"
        f" change {match.below_noise} of {match.parameters} gradients as much"
    )


def _positions_check(check: Check, losses: LossesSection) -> Check:
    """Return `check` for the first full-length step, with a `reason` if no losses by position were compared.

    It is `below_noise` if rounding could hide one wrong label among the boundary positions.
    """
    check = replace(check, steps=0, compares_training=True)
    match = losses.position_match
    if losses.by_position is None:
        return replace(check, reason=NO_LOGITS)
    if losses.compared_with is None or match is None:
        return replace(check, reason=NO_REFERENCE)
    hidden_mistake = None
    if match.limit >= BOUNDARY_EFFECT:
        hidden_mistake = (
            f"a wrong label at the end of one shard would change the boundary loss by some"
            f" {BOUNDARY_EFFECT:.1%}; rounding may change it by {match.limit:.1%}"
        )
    return replace(check, against=f"cell {losses.compared_with}", steps=1, below_noise=hidden_mistake)


def _why_tokens_are_wrong(losses: LossesSection) -> str | None:
    """Return a message about the first step whose tokens differ from its data; None without one."""
    digests = zip(losses.tokens_digest, losses.expected_digest, strict=True)
    for step, (digest, expected) in enumerate(digests):
        if digest != expected:
            return (
                f"step {step}: the ranks saw other tokens than the step holds (digest {digest}, expected"
                f" {expected}); some were dropped, repeated or misplaced"
            )
    return None


def _why_numbers_are_wrong(losses: LossesSection) -> str | None:
    """Return a message about the first loss or norm that is None, not finite or a norm below 0, else None.

    Steps are searched in order. The first message names the rank at fault, because a loss that is not finite
    on one rank spreads to all ranks in the next step.
    """
    steps = zip(losses.grad_norm, zip(*losses.loss_sums, strict=True), strict=True)
    for step, (norm, sums) in enumerate(steps):
        for rank, loss in enumerate(sums):
            if loss is None or not math.isfinite(loss):
                return f"losses: the loss of step {step} on rank {rank} is {loss}"
        if norm is None or not 0 <= norm < math.inf:
            return f"losses: the gradient norm of step {step} is {norm}"
    return None


FACTS = LossesFacts()
