"""Base class of a workload, which is what a step is: a training step, or one attention call."""

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
from bench.measure.rank_pass import StepRequest, StepRequests
from bench.measure.subject import Subject
from bench.measure.workloads import load_workload_class
from bench.ranks.groups import RankGroups
from bench.ranks.log import StepPhase
from bench.strategies import STRATEGIES, load_strategy_class
from bench.strategies.strategy import Strategy, Wiring

HIDDEN_SIZE = 64
"""Hidden size of the small model in `use_libraries_once`."""
VOCABULARY = 256
"""Vocabulary size of the small model in `use_libraries_once`."""
SYNTHETIC = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0)


@dataclass(frozen=True, slots=True)
class WorkloadRank:
    """Installed strategy and device of one rank, on which a workload is built."""

    strategy: Strategy
    wiring: Wiring
    device: torch.device
    phase: StepPhase
    begin: Callable[[str], None] = lambda _: None
    """Callback that is called before each part of building the workload, with the name of the part."""


class Workload(Subject):
    """Subject whose steps the harness runs."""

    optimizer: object | None = None
    """Object whose method `update` ends a step; None if nothing is trained."""

    def __init__(self, rank: WorkloadRank) -> None:
        self.rank = rank
        self.strategy: Strategy = rank.strategy
        self.cell = rank.strategy.cell
        self.device = rank.device
        self.attention_name = rank.wiring.attention_name
        self.attention_modules = f"{rank.strategy.package_name}."
        cluster = self.cell.cluster
        self.nodes = cluster.nodes
        self.other_ranks_on_gpu = cluster.ranks_sharing_gpu(
            rank.strategy.groups.rank % cluster.ranks_per_node
        )

    @abstractmethod
    def step(self, number: int) -> Any:
        """Run one full-length step without waiting for the device.

        Args:
            number: Number of the step, from 0.

        Returns:
            Result for the pass that requested the step.
        """

    @abstractmethod
    def short_step(self) -> None:
        """Run the cheapest step that triggers all one-time work, such as lazy imports."""

    def watch_attention(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        return self.strategy.watch_attention(watch)

    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        return method_spans(self.optimizer, "update")

    def run(self, passes: StepRequests) -> None:
        """Run the steps that the passes request.

        An error of a step is raised in the pass that requested it, and then here.
        """

        def wants_step(outcome: Any) -> bool:
            """Send the passes the last full-length step's result; return whether they request another."""
            try:
                while (request := passes.send(outcome)) is not StepRequest.STEP:
                    outcome = None
                    if request is StepRequest.FIRST:
                        self.short_step()
            except StopIteration:
                return False
            return True

        try:
            self.take_steps(wants_step)
        except BaseException as error:
            passes.throw(error)
            raise

    def take_steps(self, wants_step: Callable[[Any], bool]) -> None:
        """Run full-length steps 0, 1, 2, ... as long as `wants_step` returns True.

        Args:
            wants_step: Called with the result of the previous step, None before the first.
        """
        number, outcome = 0, None
        while wants_step(outcome):
            outcome = self.step(number)
            number += 1


def use_libraries_once(cell: Cell, groups: RankGroups, device: torch.device) -> None:
    """Run a short step of a small cell with this strategy, kernel and engine; every rank must call this.

    Libraries then have created their threads, connections and generated code. The memory of these does not
    depend on the size of a cell.
    """
    small = _smallest_cell(cell)
    strategy = load_strategy_class(small.strategy)(small, groups, STRATEGIES[small.strategy])
    with strategy.install() as wiring:
        load_workload_class(small.workload.name)(
            WorkloadRank(strategy, wiring, device, StepPhase())
        ).short_step()


def _smallest_cell(cell: Cell) -> Cell:
    """Return the cell with one small layer and synthetic data, but all heads, because ranks divide them."""
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
