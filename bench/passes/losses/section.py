"""The training signal of every step, and the tokens that the ranks saw. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.passes.facts import PassFacts, RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The training signal of every full-length step, equal on all ranks; inspected and traced ones last."""

    loss: list[float]
    grad_norm: list[float]
    valid_tokens: list[int]
    tokens_digest: list[str]
    """By step, a sum over the (position, token, label) that entered the models, which does not depend on how
    the step was sharded."""
    expected_digest: list[str]
    """The same sum from the data, without any sharding."""
    held_against: str | None = None
    """The cell of the same work whose losses and gradient norms these were compared with."""
    held_steps: int = 0
    """How many steps, from the first, both cells ran."""


class LossesFacts(PassFacts[Losses, Losses]):
    name = "losses"
    part = Losses
    is_own_work = False
    is_evidence = True

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Losses:  # noqa: ARG002
        return self.parts(reports)[0]

    def gate(self, cell: RunConfig, section: Losses) -> str | None:  # noqa: ARG002
        """The ranks trained on the step's tokens, each once, at its position."""
        digests = zip(section.tokens_digest, section.expected_digest, strict=True)
        for step, (seen, expected) in enumerate(digests):
            if seen != expected:
                return (
                    f"step {step}: the ranks saw other tokens than the step holds (digest {seen}, expected"
                    f" {expected}); some were dropped, repeated or misplaced"
                )
        return None


FACTS = LossesFacts()
