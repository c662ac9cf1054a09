"""The parity pass: attention against float64, before anything is timed."""

from __future__ import annotations

from bench.passes.parity.attention import check_attention
from bench.passes.parity.section import Parity
from bench.passes.rank_pass import RankPass
from bench.ranks.log import Stage, WrongResultError
from bench.ranks.memory_limit import without_memory_limit


class ParityPass(RankPass):
    found: Parity

    def before_steps(self) -> None:
        with self.measurement.log.during("parity"), without_memory_limit():
            self.found = self._checked()

    def part(self) -> Parity:
        return self.found

    def _checked(self) -> Parity:
        """Errors and limits of all tensors; raises WrongResultError where one is beyond its limit."""
        subject = self.measurement.subject
        if subject.strategy is None:
            return Parity(tokens=0, errors={}, limits={})
        self.measurement.log.tell(Stage("parity", "attention"))
        outcome = check_attention(subject.strategy, subject.device, causal=subject.causal)
        if outcome.divergence is not None:
            raise WrongResultError(f"attention parity: {outcome.divergence}")
        return Parity(tokens=outcome.tokens, errors=outcome.errors, limits=outcome.limits)


PASS = ParityPass
