"""One cell, fully resolved: what a record's `config` holds and what every rank is handed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_PAIRS: Mapping[str, str] = {"options": "strategy", "env": "env"}
"""Fields that are pairs of name and value, and the group their names stand in on the command line."""

NOT_USED = "none"
"""A choice that a cell has no use for, such as the engine of one that trains nothing."""
OWN = "own"
"""A choice that is somebody's own code, not one of the tables'."""
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class ConfigError(ValueError):
    """A request that cannot be carried out, in one line: value, rule, way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers a transformer is built from; `path` names a local checkpoint instead of random weights."""

    name: str
    family: str
    path: str | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    attention_bias: bool
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where tokens come from: `text` reads `path` (or Python's own documentation), `synthetic` computes them.

    The labels of a sequence's first `prompt_tokens` tokens do not count in the loss.
    """

    name: str
    path: str | None
    tokenizer: str | None
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The ranks of a cell and what they run on.

    `memory_limit_gib` bounds what one rank may allocate: on a GPU in all, on a CPU beyond what it holds
    once it has joined the others. With `ranks_per_gpu` above 1 ranks share a GPU: right for checking results,
    and its times say nothing.
    """

    name: str
    world_size: int
    ranks_per_gpu: int
    device: str
    backend: str
    threads_per_rank: int
    memory_limit_gib: float | None

    def device_index(self, local_rank: int) -> int:
        """Which of a host's visible GPUs a rank is on; neighbours in rank share one."""
        return local_rank // self.ranks_per_gpu

    def ranks_beside(self, local_rank: int) -> int:
        """How many other ranks of one host are on this rank's GPU."""
        first = self.device_index(local_rank) * self.ranks_per_gpu
        return min(self.ranks_per_gpu, self.world_size - first) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What a step is: `train`, or `attention` alone; `mask` is `causal` or `full`, in training causal."""

    name: str
    mask: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """How much of what is measured; `budget_s` and `timeout_s` are seconds.

    A `budget_s` of 0 is of a loop that is observed: nothing but `steps` limits its timed pass.
    """

    steps: int
    warmup_steps: int
    budget_s: float
    repeats: int
    timeout_s: float
    trace: bool
    keep_traces: bool
    gradients: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One cell. `seq_len` counts tokens of the whole sequence; `batch` counts whole sequences.

    `options` are the strategy's own choices, such as a rotation.
    """

    seq_len: int
    batch: int
    grad_accum: int
    strategy: str
    options: tuple[tuple[str, str], ...]
    layout: str
    kernel: str
    dtype: str
    model: ModelConfig
    engine: str
    trainer: str
    workload: WorkloadConfig
    data: DataConfig
    mode: str
    hardware: str
    cluster: ClusterConfig
    sp_degree: int
    ulysses_degree: int
    dp_replicate: int
    dp_shard: int
    checkpointing: bool
    loss: str
    measure: MeasureConfig
    seed: int
    env: tuple[tuple[str, str], ...]
    experiment: str

    def option(self, name: str) -> str:
        """The value of one of the strategy's own choices."""
        return dict(self.options)[name]

    @property
    def dp_degree(self) -> int:
        """Sequences in flight at once: data-parallel groups of `sp_degree` ranks each."""
        return self.dp_replicate * self.dp_shard

    @property
    def ring_degree(self) -> int:
        """Ranks of one ring: those that share a sequence but not its heads."""
        return self.sp_degree // self.ulysses_degree

    @property
    def shard_len(self) -> int:
        """Tokens of one sequence that one rank holds."""
        return self.seq_len // self.sp_degree

    @property
    def sequences_per_step(self) -> int:
        return self.batch * self.dp_degree * self.grad_accum

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.sequences_per_step

    @property
    def cell_id(self) -> str:
        """Twelve hex digits that two cells share exactly when they ask for the same work."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """All that decides what a cell does: repeats, files kept and who asked for it do not."""
        fields = asdict(self)
        del fields["experiment"], fields["measure"]["repeats"], fields["measure"]["keep_traces"]
        return fields

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that `from_json` turns back into the same cell."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RunConfig:
        return cls(
            **fields
            | {
                "model": ModelConfig(**fields["model"]),
                "data": DataConfig(**fields["data"]),
                "workload": WorkloadConfig(**fields["workload"]),
                "cluster": ClusterConfig(**fields["cluster"]),
                "measure": MeasureConfig(**fields["measure"]),
                "options": tuple((name, value) for name, value in fields["options"]),
                "env": tuple((name, value) for name, value in fields["env"]),
            }
        )

    def flat(self) -> dict[str, Any]:
        """The record's `config`: the command line's names, choices as strings, the rest as `group.key`."""
        flat: dict[str, Any] = {}
        for key, value in asdict(self).items():
            if key in _PAIRS:
                flat |= {f"{_PAIRS[key]}.{name}": text for name, text in value}
            elif isinstance(value, dict):
                flat[key] = value.pop("name", None) or value
                flat |= {f"{key}.{inner}": leaf for inner, leaf in value.items()}
            else:
                flat[key] = value
        del flat["measure"]
        return flat
