"""The updates pass on a rank: it digests the parameters before the first step and around the inspected step.

Parameters must be finite before the first step and after the last, the optimizer's state after the last.
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
from bench.training.data import splitmix64
from bench.training.engines.engine import Engine
from bench.training.optimizer_facts import OPTIMIZER_FACTS

CHUNK = 2**20
"""Number of elements that are digested at once; each takes eight bytes of memory."""


class UpdatesPass(RankPass):
    first_digests: Mapping[str, str]
    """Digest of this rank's shard before the first step, by parameter."""
    updates: RankUpdates | None = None

    def before_steps(self) -> None:
        """Digest the parameters; raise WrongResultError if a number of this rank's shards is not finite."""
        trainer = self.measurement.subject.trainer
        if trainer is None:
            return
        with self.measurement.log.run_phase("updates"):
            for name in names_not_finite(trainer.engine.shards()):
                raise WrongResultError(f"numbers of {name} are not finite before the first step")
            self.first_digests = digest_shards(trainer.engine)

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        """Find the parameters that no earlier step changed, or that the inspected step does not change."""
        trainer = self.measurement.subject.trainer
        if trainer is None:
            yield
            return
        before_step = digest_shards(trainer.engine)
        yield
        after_step = digest_shards(trainer.engine)
        unchanged = [
            name for name in after_step if before_step[name] in (self.first_digests[name], after_step[name])
        ]
        shards = dict(trainer.engine.shards())
        self.updates = RankUpdates(
            shard_index=trainer.engine.shard_index,
            digests=after_step,
            unmoved=[name for name in unchanged if bool(shards[name].any())],
            not_finite=[],
        )

    def part(self) -> RankUpdates | None:
        trainer = self.measurement.subject.trainer
        if self.updates is None or trainer is None:
            return None
        with self.measurement.log.run_phase("updates"):
            state_keys = OPTIMIZER_FACTS[trainer.cell.optimizer.name].state_keys
            tensors = parameters_and_state(trainer.engine, state_keys)
            return replace(self.updates, not_finite=[*names_not_finite(tensors)])


def parameters_and_state(engine: Engine, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shards of parameters by name, then of their optimizer state under `keys`."""
    yield from engine.shards()
    for key in keys:
        yield from ((f"{key} of {name}", state) for name, state in engine.optimizer_state(key))


def names_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Yield the names of tensors with a number that is not finite, without a copy of a tensor's size."""
    for name, values in tensors:
        if values.numel() > 0 and not bool(torch.stack(values.aminmax()).isfinite().all()):
            yield name


def digest_shards(engine: Engine) -> dict[str, str]:
    """Return the digest of each of this rank's shards, by parameter, without empty shards."""
    return {name: digest(shard) for name, shard in engine.shards() if shard.numel() > 0}


def digest(values: Tensor) -> str:
    """Return a hexadecimal hash of a tensor that depends on every bit and its place."""
    bits = bits_of(values.contiguous().flatten())
    places = torch.arange(min(CHUNK, bits.numel()), device=values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for first, chunk in zip(range(0, bits.numel(), CHUNK), bits.split(CHUNK), strict=True):
        total += splitmix64((places[: chunk.numel()] + first) * 1_000_003 + chunk).sum()
    return f"{int(total) % 2**64:016x}"


PASS = UpdatesPass
