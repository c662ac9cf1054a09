"""A kind of step that the harness runs itself, over and over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.attention.watch import AttentionWatch
from bench.config import Cell, DataConfig
from bench.measure.hooks import Spans, method_spans
from bench.measure.objective.section import MAX_TOKENS as OBJECTIVE_TOKENS
from bench.measure.rank_pass import StepRequest, Steps
from bench.measure.subject import Subject
from bench.measure.workloads import workload_code
from bench.ranks.groups import RankGroups
from bench.ranks.log import StepPhase
from bench.strategies import STRATEGIES, runnable
from bench.strategies.strategy import Strategy, Wiring

HIDDEN_SIZE = 64
VOCABULARY = 256
"""Sizes of the model of `use_libraries_once`."""
SYNTHETIC = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0)


@dataclass(frozen=True, slots=True)
class Rank:
    """What a workload is built on: an installed strategy and this rank's device."""

    strategy: Strategy
    wiring: Wiring
    device: torch.device
    phase: StepPhase
    begin: Callable[[str], None] = lambda _: None
    """Called with each part of the building, which may take long, before it begins."""


class Workload(Subject):
    """One kind of step; the passes run, time, trace and inspect it without knowing which."""

    optimizer: object | None = None
    """What has a method `update`, the optimizer's part of a step; None where nothing is trained."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.strategy: Strategy = rank.strategy
        self.cell = rank.strategy.cell
        self.device = rank.device
        self.attention_name = rank.wiring.attention_name
        self.attention_code = f"{rank.strategy.package_name}."
        cluster = self.cell.cluster
        self.nodes = cluster.nodes
        self.ranks_beside = cluster.ranks_beside(rank.strategy.groups.rank % cluster.ranks_per_node)

    @abstractmethod
    def step(self, number: int) -> Any:
        """One step at full length, not waited for; what it returns goes to the pass that asked."""

    @abstractmethod
    def short_step(self) -> None:
        """The cheapest step that pays for all that happens only once."""

    def watched(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        return self.strategy.watched(watch)

    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        return method_spans(self.optimizer, "update")

    def run(self, passes: Steps) -> None:
        """Run the steps that the passes ask for.

        An error of a step is raised in the pass that asked for it, and then here.
        """

        def next_step(outcome: Any) -> bool:
            """Whether the passes, told of the last full-length step, ask for another one."""
            try:
                while (ask := passes.send(outcome)) is not StepRequest.STEP:
                    outcome = None
                    if ask is StepRequest.FIRST:
                        self.short_step()
            except StopIteration:
                return False
            return True

        try:
            self.take_steps(next_step)
        except BaseException as error:
            passes.throw(error)
            raise

    def take_steps(self, next_step: Callable[[Any], bool]) -> None:
        """Full-length steps, numbered from 0, while `next_step`, told of the last one, wants more."""
        number, outcome = 0, None
        while next_step(outcome):
            outcome = self.step(number)
            number += 1


def use_libraries_once(cell: Cell, groups: RankGroups, device: torch.device) -> None:
    """Take a step of the smallest cell with the same strategy, kernel and engine; every rank must call it.

    Libraries then have their threads, connections and generated code, which are no part of a cell's size.
    """
    small = _smallest(cell)
    strategy = runnable(small.strategy)(small, groups, STRATEGIES[small.strategy])
    with strategy.install() as wiring:
        workload_code(small.workload.name)(Rank(strategy, wiring, device, StepPhase())).short_step()


def _smallest(cell: Cell) -> Cell:
    """Return the cell with a model of one small layer, but with all heads, because ranks share them."""
    model = replace(
        cell.model,
        path=None,
        num_layers=1,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
    )
    multiple = STRATEGIES[cell.strategy].length_multiple(cell)
    seq_len = max(multiple, OBJECTIVE_TOKENS // multiple * multiple)
    return replace(cell, model=model, data=SYNTHETIC, seq_len=seq_len, padding=0, batch=1, grad_accum=1)
