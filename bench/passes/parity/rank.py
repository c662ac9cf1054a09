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
        """Raises WrongResultError where a tensor is beyond its limit."""
        subject, log = self.measurement.subject, self.measurement.log
        with log.during("parity"), without_memory_limit():
            if subject.strategy is None:
                self.found = Parity(tokens=0, errors={}, limits={})
                return
            log.tell(Stage("parity", "attention"))
            self.found, divergence = check_attention(subject.strategy, subject.device, causal=subject.causal)
            if divergence is not None:
                raise WrongResultError(f"attention parity: {divergence}")

    def part(self) -> Parity:
        return self.found


PASS = ParityPass
