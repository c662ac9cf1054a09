"""The parity pass: attention and objective against float64, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bench.passes.parity.attention import ParityOutcome, check_attention
from bench.passes.parity.objective import check_objective
from bench.passes.parity.section import RankParity
from bench.passes.rank_pass import RankPass
from bench.passes.subject import Subject
from bench.ranks.log import Stage, WrongResultError
from bench.ranks.memory_limit import without_memory_limit
from bench.training.trainer_facts import TRAINER_FACTS


class ParityPass(RankPass):
    found: RankParity

    def before_steps(self) -> None:
        with self.measurement.log.during("parity"), without_memory_limit():
            self.found = self._checked()

    def part(self) -> RankParity:
        return self.found

    def _checked(self) -> RankParity:
        """Errors and limits of all checks; raises WrongResultError where one is beyond its limit."""
        errors: dict[str, float] = {}
        limits: dict[str, float] = {}
        tokens = 0
        for name, check in checks_of(self.measurement.subject).items():
            self.measurement.log.tell(Stage("parity", name))
            outcome = check()
            if outcome.divergence is not None:
                raise WrongResultError(f"{name} parity: {outcome.divergence}")
            tokens = outcome.tokens
            errors |= outcome.errors
            limits |= outcome.limits
        return RankParity(tokens=tokens, errors=errors, limits=limits)


def checks_of(subject: Subject) -> Mapping[str, Callable[[], ParityOutcome]]:
    """The checks by what they check; every rank must run them all."""
    checks: dict[str, Callable[[], ParityOutcome]] = {}
    if subject.strategy is not None:
        checks["attention"] = partial(
            check_attention, subject.strategy, subject.device, causal=subject.causal
        )
    if subject.trainer is not None and not TRAINER_FACTS[subject.trainer.cell.trainer].is_stack:
        checks["objective"] = partial(check_objective, subject.trainer, subject.device)
    return checks


PASS = ParityPass
