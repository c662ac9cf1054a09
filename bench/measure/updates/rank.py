"""Digests of this rank's parameters before the first step, and before and after the inspected one.

Parameters have to be finite before the first step and after the last, the optimizer's state after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from bench.attention.watch import bits_of
from bench.measure.rank_pass import RankPass
from bench.measure.updates.section import RankUpdates
from bench.ranks.log import WrongResultError
from bench.training.data import mixed
from bench.training.engines.engine import Engine
from bench.training.optimizer_facts import OPTIMIZER_FACTS

CHUNK = 2**20
"""Numbers that are digested at once: eight bytes for each are in memory."""


class UpdatesPass(RankPass):
    before: Mapping[str, str]
    found: RankUpdates | None = None

    def before_steps(self) -> None:
        """Raises WrongResultError on a rank whose parameters are not finite."""
        trainer = self.measurement.subject.trainer
        if trainer is None:
            return
        with self.measurement.log.during("updates"):
            for name in not_finite(trainer.engine.shards()):
                raise WrongResultError(f"numbers of {name} are not finite before the first step")
            self.before = digests(trainer.engine)

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        trainer = self.measurement.subject.trainer
        if trainer is None:
            yield
            return
        between = digests(trainer.engine)
        yield
        after = digests(trainer.engine)
        same = [name for name in after if between[name] in (self.before[name], after[name])]
        shards = dict(trainer.engine.shards())
        self.found = RankUpdates(
            shard_index=trainer.engine.shard_index,
            digests=dict(after),
            unmoved=[name for name in same if bool(shards[name].any())],
            not_finite=[],
        )

    def part(self) -> RankUpdates | None:
        trainer = self.measurement.subject.trainer
        if self.found is None or trainer is None:
            return None
        with self.measurement.log.during("updates"):
            numbers = numbers_of(trainer.engine, OPTIMIZER_FACTS[trainer.cell.optimizer.name].state_keys)
            return replace(self.found, not_finite=[*not_finite(numbers)])


def numbers_of(engine: Engine, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of the parameters, and what the optimizer keeps of them under these keys."""
    yield from engine.shards()
    for key in keys:
        yield from ((f"{key} of {name}", state) for name, state in engine.optimizer_state(key))


def not_finite(named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """The names of tensors in which a number is not; it takes no memory of their size."""
    for name, values in named:
        if values.numel() > 0 and not bool(torch.stack(values.aminmax()).isfinite().all()):
            yield name


def digests(engine: Engine) -> dict[str, str]:
    """Of this rank's shard of every parameter of which it has one."""
    return {name: digest(shard) for name, shard in engine.shards() if shard.numel() > 0}


def digest(values: Tensor) -> str:
    """A number that any other bit anywhere changes, in hexadecimal."""
    bits = bits_of(values.contiguous().flatten())
    places = torch.arange(min(CHUNK, bits.numel()), device=values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for first, chunk in zip(range(0, bits.numel(), CHUNK), bits.split(CHUNK), strict=True):
        total += mixed((places[: chunk.numel()] + first) * 1_000_003 + chunk).sum()
    return f"{int(total) % 2**64:016x}"


PASS = UpdatesPass
