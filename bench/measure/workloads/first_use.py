"""What libraries take once, taken before a limit on memory counts: it is no part of any cell's size."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.config import DataConfig, RunConfig
from bench.measure.objective.section import MAX_TOKENS as OBJECTIVE_TOKENS
from bench.measure.workloads import workload_code
from bench.measure.workloads.workload import Rank
from bench.ranks.groups import RankGroups
from bench.ranks.log import StepPhase
from bench.strategies import STRATEGIES, runnable

TOKENS = OBJECTIVE_TOKENS
HIDDEN_SIZE = 64
VOCABULARY = 256
SYNTHETIC = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0)


def use_libraries_once(cell: RunConfig, groups: RankGroups, device: torch.device) -> None:
    """Take a step of the smallest cell with the same strategy, kernel and engine; every rank must call it.

    Threads, connections, generated code and what is imported only when needed are there afterwards.
    """
    small = _smallest(cell)
    strategy = runnable(small.strategy)(small, groups, STRATEGIES[small.strategy])
    with strategy.install() as wiring:
        workload_code(small.workload.name)(Rank(strategy, wiring, device, StepPhase())).short_step()


def _smallest(cell: RunConfig) -> RunConfig:
    """As many heads as the cell has, because ranks share them, and hardly anything else."""
    model = replace(
        cell.model,
        path=None,
        num_layers=1,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
    )
    multiple = STRATEGIES[cell.strategy].length_multiple(cell)
    seq_len = max(multiple, TOKENS // multiple * multiple)
    return replace(cell, model=model, data=SYNTHETIC, seq_len=seq_len, padding=0, batch=1, grad_accum=1)
