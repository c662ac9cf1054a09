"""The arguments of `observe`, and the cell that describes an observed loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bench.common.environment import this_machine
from bench.config import (
    USER_CODE,
    Cell,
    ClusterConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    MeasureConfig,
    WorkloadConfig,
)
from bench.extras.observe.attention_check import DTYPE_NAMES
from bench.extras.observe.loop import ObservedLoop
from bench.extras.observe.sharding import find_layout
from bench.extras.observe.tokens import ShardTokens
from bench.measure import planned_stages
from bench.request.hardware import hardware_of_machine
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveRequest:
    """Arguments of `observe`. Raises ConfigError if a value is not legal."""

    strategy: str
    folder: Path
    steps: int
    warmup_steps: int
    report: bool

    def __post_init__(self) -> None:
        facts = STRATEGIES.get(self.strategy)
        if facts is not None and facts.options:
            raise ConfigError(
                f"strategy={self.strategy}: bench.observe cannot read its options"
                f" ({', '.join(facts.options)}) from your loop; pass another name"
            )

    @property
    def measure(self) -> MeasureConfig:
        return MeasureConfig(steps=self.steps, warmup_steps=self.warmup_steps)

    @property
    def steps_needed(self) -> int:
        """Number of steps until the record: the first, the compared one, and the steps of all passes."""
        return 2 + sum(stage.steps for stage in planned_stages(self.measure, step_s=0.0))


def observed_cell(
    loop: ObservedLoop, request: ObserveRequest, shards: Sequence[ShardTokens], groups: int | None = None
) -> Cell:
    """Return the cell of a loop, from some shards of a sequence and the number of groups that count."""
    first, sp_degree, world_size = shards[0], len(shards[0].group), dist.get_world_size()
    network, facts = loop.model.networks[0], STRATEGIES.get(request.strategy)
    return Cell(
        seq_len=first.seq_len,
        batch=first.batch,
        grad_accum=first.micro_steps,
        strategy=request.strategy,
        options=(),
        layout=find_layout(shards),
        kernel=loop.attention_name,
        dtype=DTYPE_NAMES.get(loop.attention_facts.dtype, str(loop.attention_facts.dtype)),
        model=loop.model.sizes,
        engine=EngineConfig(name=loop.model.engine),
        trainer=USER_CODE,
        workload=WorkloadConfig(name="train", mask="causal"),
        data=DataConfig(name=USER_CODE, path=None, tokenizer=None, prompt_tokens=0),
        mode="measure",
        hardware=hardware_of_machine(this_machine(), loop.device.type),
        cluster=ClusterConfig(
            name=USER_CODE,
            world_size=world_size,
            device=loop.device.type,
            backend=str(dist.get_backend()),
            ranks_per_gpu=1,
            threads_per_rank=torch.get_num_threads(),
            memory_limit_gib=None,
        ),
        sp_degree=sp_degree,
        ulysses_degree=facts.ulysses_degree(sp_degree, loop.model.sizes) if facts else 1,
        dp_replicate=1,
        dp_shard=groups or world_size // sp_degree,
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in network.modules()),
        loss=USER_CODE,
        measure=request.measure,
        seed=0,
        env=(),
        experiment="none",
    )
