"""An observed loop as a cell: what its user asked for, and what is known of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bench.common.environment import this_machine
from bench.config import (
    OWN,
    Cell,
    ClusterConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    MeasureConfig,
    ModelConfig,
    WorkloadConfig,
)
from bench.extras.observe.loop import Loop
from bench.extras.observe.tokens import RankTokens, layout_of, seq_len
from bench.measure import planned_stages
from bench.request import values
from bench.request.hardware import this_hardware
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveRequest:
    """What the user asked for: the strategy's name in the report, where to, how many steps."""

    strategy: str
    folder: Path
    steps: int
    warmup_steps: int
    report: bool

    def __post_init__(self) -> None:
        values.whole("steps", self.steps)
        values.whole("warmup_steps", self.warmup_steps, least=0)
        facts = STRATEGIES.get(self.strategy)
        if facts is not None and facts.options:
            raise ConfigError(
                f"strategy={self.strategy}: has choices of its own ({', '.join(facts.options)}), which cannot"
                " be told from outside; take another name"
            )

    @property
    def measure(self) -> MeasureConfig:
        """How much of what is measured: only the number of steps limits it."""
        return MeasureConfig(
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            warmup_s=0.0,
            min_timed_steps=0,
            budget_s=0.0,
            repeats=1,
            repeats_budget_s=0,
            reference_budget_s=0,
            timeout_s=0.0,
            trace=True,
            keep_traces=False,
            gradients=False,
        )

    @property
    def steps_needed(self) -> int:
        """The first step, the one whose attention is compared, and what the passes will ask for."""
        return 2 + sum(stage.steps for stage in planned_stages(self.measure, step_s=0.0))


def observed_cell(
    loop: Loop, model: ModelConfig, request: ObserveRequest, sharers: Sequence[RankTokens]
) -> Cell:
    """The loop as a cell; `sharers` are ranks of one sequence, what nobody can know is `own`."""
    first, sp_degree, world_size = sharers[0], len(sharers[0].group), dist.get_world_size()
    facts = STRATEGIES.get(request.strategy)
    cluster = ClusterConfig(
        name=OWN,
        world_size=world_size,
        device=loop.device.type,
        backend=str(dist.get_backend()),
        ranks_per_gpu=1,
        threads_per_rank=torch.get_num_threads(),
        memory_limit_gib=None,
    )
    return Cell(
        seq_len=seq_len(first),
        batch=first.batch,
        grad_accum=first.micro_steps,
        strategy=request.strategy,
        options=(),
        layout=layout_of(sharers),
        kernel=loop.attention_name,
        dtype=loop.dtype,
        model=model,
        engine=EngineConfig(name=loop.model.engine),
        trainer=OWN,
        workload=WorkloadConfig(name="train", mask="causal"),
        data=DataConfig(name=OWN, path=None, tokenizer=None, prompt_tokens=0),
        mode="measure",
        hardware=this_hardware(this_machine(), cluster.device),
        cluster=cluster,
        sp_degree=sp_degree,
        ulysses_degree=facts.ulysses_degree(sp_degree, model) if facts else 1,
        dp_replicate=1,
        dp_shard=world_size // sp_degree,
        checkpointing=loop.model.checkpointing,
        loss=OWN,
        measure=request.measure,
        seed=0,
        env=(),
        experiment="none",
    )
