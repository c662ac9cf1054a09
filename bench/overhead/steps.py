"""A step under the harness and the same step in a bare loop, on one model, optimizer and data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.watch import AttentionWatch
from bench.passes.tap import CommunicationTap
from bench.passes.timing.clock import StepClock
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import FedTokens
from bench.training.engines import DDP
from bench.workloads.train import Train


class Untold(FedTokens):
    """Tokens that nobody asks for: what the model notes for the harness is no part of a bare step."""

    def add(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Kinds:
    """The two kinds of step that are compared; each takes a step's number and returns its milliseconds."""

    workload: Train

    def bare(self, number: int) -> float:
        """What a user writes by hand, with nothing of ours but model, strategy and data."""
        with self._untold():
            start = time.perf_counter()
            self._bare_step(number)
            return (time.perf_counter() - start) * 1e3

    def harness(self, number: int) -> float:
        """A step of the timed pass, its marks of the clock included."""
        start = time.perf_counter()
        self._timed_step(number)
        return (time.perf_counter() - start) * 1e3

    def collectives(self) -> dict[str, int]:
        """How many collective calls a bare and a timed step make: counted, so that one more is found."""
        return {"bare": self._calls(self._bare_step), "harness": self._calls(self._timed_step)}

    def _calls(self, step: Callable[[int], None]) -> int:
        tap = CommunicationTap(AttentionWatch())
        with tap:
            step(0)
        return len(tap.calls)

    def _bare_step(self, number: int) -> None:
        rank, cell, engine = self.workload.rank, self.workload.cell, self._engine()
        groups = rank.strategy.groups
        whole = self.workload.trainer.data.micro_batch(number, 0, groups.data_rank, cell.padded_len)
        batch = rank.strategy.shard(whole)
        valid = (batch.labels != IGNORED_LABEL).sum()
        dist.all_reduce(valid)
        with engine.autocast:
            loss_sum = engine.module(batch.input_ids, batch.labels, batch.position_ids)
            (loss_sum * (groups.world_size / valid)).backward()
        optimizer, schedule = engine.updater.optimizer, engine.updater.schedule
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), cell.optimizer.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def _timed_step(self, number: int) -> None:
        clock = StepClock(self.workload.rank.device)
        clock.mark()
        self.workload.step(number)
        clock.mark()

    @contextmanager
    def _untold(self) -> Iterator[None]:
        model = self._engine().model
        told, model.fed = model.fed, Untold()
        try:
            yield
        finally:
            model.fed = told

    def _engine(self) -> DDP:
        engine = self.workload.optimizer
        assert isinstance(engine, DDP)
        return engine
