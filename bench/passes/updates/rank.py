"""Digests of this rank's parameters before the first step, and before and after the inspected one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.attention.capture import bits_of
from bench.passes.rank_pass import RankPass
from bench.passes.updates.section import RankUpdates
from bench.training.data import mixed
from bench.training.engines import Engine

CHUNK = 2**20
"""Numbers that are digested at once: eight bytes for each are in memory."""


class UpdatesPass(RankPass):
    before: Mapping[str, str]
    found: RankUpdates | None = None

    def before_steps(self) -> None:
        trainer = self.measurement.subject.trainer
        if trainer is not None:
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
            not_finite=[name for name, shard in shards.items() if not bool(shard.isfinite().all())],
        )

    def part(self) -> RankUpdates | None:
        return self.found


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
