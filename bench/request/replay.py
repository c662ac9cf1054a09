"""Requests of `mode=replay`: which rank runs, and which cells no single rank can stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.config import AUTO, ConfigError, ReplayConfig, RunConfig
from bench.request import values
from bench.request.placement import GATHERED
from bench.request.target import REPLAY
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import NATIVE, is_stack

BACKEND = "fake"
"""The process-group library of a replay: torch's own for groups of which one rank exists."""


def with_replayed_rank(cell: RunConfig, asked: Any) -> RunConfig:
    """The cell with the rank that runs where its mode is a replay; nothing is traced, no reference runs.

    Raises ConfigError for a rank that the cell does not have, and for one that is named in another mode.
    """
    rank = None if asked == AUTO else values.whole("replay.rank", asked, least=0)
    if cell.mode != REPLAY:
        if rank is not None:
            raise ConfigError(f"replay.rank={rank}: belongs to mode=replay; add mode=replay, or leave it out")
        return cell
    ranks = cell.cluster.world_size
    if rank is None or ranks == 1:
        rank = busiest_rank(cell)
    if rank >= ranks:
        raise ConfigError(
            f"replay.rank={rank}: ranks are numbered from 0 to {ranks - 1}; write replay.rank=auto"
        )
    return replace(
        cell,
        replay=ReplayConfig(rank=rank),
        cluster=replace(cell.cluster, backend=BACKEND),
        measure=replace(cell.measure, trace=False, reference_budget_s=0.0),
    )


def busiest_rank(cell: RunConfig) -> int:
    """The rank with most work in the first group of ranks that share a sequence.

    The last one where work is spread unevenly: its queries see the most keys. Else rank 0.
    """
    facts = STRATEGIES[cell.strategy]
    with STRATEGIES.plugin_errors_named(cell.strategy):
        is_even = cell.layout != "contiguous" or cell.ring_degree == 1 or facts.balances(cell)
        return 0 if is_even and not facts.sends_unevenly else cell.sp_degree - 1


def replay_refusals(cell: RunConfig) -> list[str]:
    """Why the cell cannot be replayed, each with a way out."""
    measure, cluster = cell.measure, cell.cluster
    stack = f"trainer={cell.trainer} reads position ids of other ranks; take trainer={NATIVE}"
    shared = f"cluster.ranks_per_gpu={cluster.ranks_per_gpu} needs several ranks; leave it out"
    refused = (
        (is_stack(cell.trainer), stack),
        (measure.gradients, "measure.gradients=true needs the gradients of all ranks; leave it out"),
        (measure.keep_traces, "measure.keep_traces=true needs a traced step; leave it out"),
        (cluster.name in GATHERED, f"cluster={cluster.name} starts ranks on other machines; leave it out"),
        (cluster.ranks_per_gpu > 1, shared),
    )
    return [f"mode=replay runs one rank: {reason}" for is_refused, reason in refused if is_refused]
