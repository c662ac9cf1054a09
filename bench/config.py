"""The settings of one cell (`Cell`), which every rank receives and every record stores as its `config`.

The comments in conf/ say what each setting means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from sys import float_info
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

_PAIRS: Mapping[str, str] = {"options": "strategy", "env": "env"}
"""Prefix of each field of `Cell` that holds pairs (name, value). A pair of `options` is written
`strategy.NAME=VALUE` on the command line, and is stored under the key `strategy.NAME`."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure CUDA's caching allocator; torch reads one of them."""
NOT_USED = "none"
"""Value of a setting that does not apply, for example `engine` when nothing is trained."""
AUTO: Final = "auto"
"""Value of a setting that the project chooses for the user."""
UNKNOWN_HARDWARE = "unknown"
"""Value of `hardware` for a GPU without a file in conf/hardware/. Its peak FLOP/s is unknown, so records have
no MFU."""
NO_FAULT = "none"
"""Value of `inject_fault` in a cell that computes correctly."""
USER_CODE = "own"
"""Value of a setting when user code replaces a built-in choice."""
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
LOW_PRECISION = ("bf16", "fp16")
DEFAULT_INIT_STD = 0.02
"""Standard deviation of random weights in transformers' configurations."""
TRAINED_PREFIX = "trained_"
"""Beginning of the name of a checkpoint that a cell has written; the name of its strategy follows."""
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
"""Values of torchrun's `--numa-binding`: the CPUs near a GPU that a rank is bound to."""
MASKS = ("causal", "full")
RANK_ORDERS = ("in_order", "reversed")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
"""Learning rate schedules, named as in transformers."""
PACKING = ("none", "documents")
ENGINE_LEAVES = (NOT_USED, "layer")


MAX_WHOLE = 2**40
"""Largest number of tokens, and of any other count. It keeps seeds and sums over samples within 64 bits."""
MAX_SECONDS = 1_000_000
"""Largest time of a setting in seconds, less than the 2^31 milliseconds that the operating system's timers
allow."""


def whole_rule(minimum: int) -> Meta:
    """Return the rule for a whole number of at least `minimum`.

    An error message about another value quotes the rule's description and its example.
    """
    description = f"a whole number from {minimum} to {MAX_WHOLE}"
    return Meta(ge=minimum, le=MAX_WHOLE, description=description, examples=[max(minimum, 2)])


def positive_rule(
    example: float | str, *, or_zero: bool = False, maximum: float = float_info.max, unit: str = ""
) -> Meta:
    """Return the rule for a finite positive number.

    Args:
        example: A valid value, which an error message about another value quotes.
        or_zero: Whether 0 is valid, too.
        maximum: Largest valid value.
        unit: Text that follows "a positive number" in the rule's description.
    """
    description = f"{'0 or ' if or_zero else ''}a positive number{unit}"
    minimum = 0.0 if or_zero else float_info.min
    return Meta(ge=minimum, le=maximum, description=description, examples=[example])


def _one_of(names: Iterable[str]) -> Meta:
    """Return the rule for a text that is one of `names`."""
    return Meta(pattern=f"^({'|'.join(names)})$")


Count = Annotated[int, whole_rule(1)]
CountOrZero = Annotated[int, whole_rule(0)]
_SECONDS = f" of seconds up to {MAX_SECONDS}"
Seconds = Annotated[float, positive_rule(20, maximum=MAX_SECONDS, unit=_SECONDS)]
SecondsOrZero = Annotated[float, positive_rule(20, or_zero=True, maximum=MAX_SECONDS, unit=_SECONDS)]
Flag = Annotated[bool, Meta(description="true or false", examples=["true"])]


class ExitCode(IntEnum):
    """Exit code of a command."""

    OK = 0
    """Every cell has a result. Cells that ran out of memory or are `unsupported` count as results."""
    FAILED = 1
    """A cell failed, or the command did not reach its goal."""
    INVALID_REQUEST = 2
    """The request is invalid; the command printed one line that says why."""
    INTERRUPTED = 130
    """The user pressed Ctrl-C, or a scheduler sent SIGTERM."""


class Resume(StrEnum):
    """Earlier records in a sweep's folder that are kept: a new sweep there does not run their cells again."""

    NEVER = "false"
    """No record may exist in the folder."""
    MATCHING = "true"
    """Final records made with the same code, packages and device as now."""
    ANY = "any"
    """All final records."""


class LeasePolicy(StrEnum):
    """Behaviour of a sweep while another sweep runs on the same devices."""

    WAIT = "wait"
    REFUSE = "refuse"
    NONE = "none"
    """Run at the same time as the other sweep, without a lease."""


LEASE_POLICIES = tuple(LeasePolicy)


class ConfigError(ValueError):
    """A request that is invalid.

    The message is one line that states the value, the rule that it breaks and a way out. Commands print it
    and exit with code 2.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer, as in its Hugging Face `config.json`."""

    name: str
    """Name of the model's file in conf/model/, or `checkpoint`."""
    family: str
    """Architecture, a transformers model type such as `qwen3` or `llama`."""
    path: str | None
    """Folder of a local checkpoint; None for random weights."""
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    tied_embeddings: Flag
    attention_bias: Flag
    rope_theta: Annotated[float, positive_rule("1e4")]
    norm_eps: Annotated[float, positive_rule("1e-6")]
    trained_len: Count | None = None
    """Longest training sequence, from which RoPE scaling starts; None if it is not known."""
    rope_scaling: str = "none"
    rope_factor: Annotated[float, positive_rule("4.0")] | None = None
    init_std: Annotated[float, positive_rule("0.02")] = DEFAULT_INIT_STD


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Source of the tokens, and how they become sequences."""

    name: str
    path: str | None
    tokenizer: str | None
    prompt_tokens: CountOrZero
    rank_order: Annotated[str, _one_of(RANK_ORDERS)] = "in_order"
    """Order in which data-parallel ranks and micro-steps receive the sequences of a step."""
    packing: Annotated[str, _one_of(PACKING)] = "none"

    @property
    def packs(self) -> bool:
        return self.packing == "documents"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Number of ranks, and the machines and devices that they run on."""

    name: str
    world_size: Count
    ranks_per_gpu: Count
    device: str
    backend: str
    threads_per_rank: Count
    memory_limit_gib: float | None
    """Limit of a rank; on a CPU the memory of its libraries does not count. None for no limit."""
    nodes: Count = 1
    """Number of machines. Each runs the same number of consecutive ranks."""
    network: str | None = None
    numa_binding: Annotated[str, _one_of(NUMA_BINDINGS)] | None = None

    def __post_init__(self) -> None:
        if self.world_size % self.nodes:
            raise ConfigError(
                f"cluster.world_size={self.world_size}: cluster.nodes={self.nodes} needs the same number of"
                " ranks on each node; write for example"
                f" cluster.world_size={self.nodes * -(-self.world_size // self.nodes)}"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def min_nodes_for(self, ranks: int) -> int:
        """Return the smallest number of nodes that hold `ranks` ranks, the same number on each node."""
        return next(
            nodes
            for nodes in range(1, ranks + 1)
            if ranks % nodes == 0 and ranks // nodes <= self.ranks_per_node
        )

    def ranks_on_node(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def device_index(self, local_rank: int) -> int:
        """Return the index of a rank's GPU on its machine. Consecutive ranks share a GPU."""
        return local_rank // self.ranks_per_gpu

    def ranks_sharing_gpu(self, local_rank: int) -> int:
        """Return the number of other ranks on the GPU of a rank."""
        first = self.device_index(local_rank) * self.ranks_per_gpu
        return min(self.ranks_per_gpu, self.ranks_per_node - first) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Contents of a step."""

    name: str
    mask: Annotated[str, _one_of(MASKS)]

    @property
    def trains(self) -> bool:
        return self.name == "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sharding of parameters, gradients and optimizer state."""

    name: str
    leaf: Annotated[str, _one_of(ENGINE_LEAVES)] = NOT_USED


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, its learning rate and gradient clipping."""

    name: str = "adamw"
    learning_rate: Annotated[float, positive_rule("1e-3")] = 1e-3
    schedule: Annotated[str, _one_of(SCHEDULES)] = "constant"
    warmup_steps: CountOrZero = 0
    schedule_steps: Count = 1000
    max_grad_norm: Annotated[float, positive_rule("1.0", or_zero=True)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Tensors that stay in host memory while they are not used."""

    activations: Flag = False
    optimizer: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Rank that runs in a cell with `mode=replay`."""

    rank: CountOrZero | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """Questions that `experiment=quality` scores."""

    questions: Count = 20
    depths: Count = 5
    chunks: CountOrZero = 0
    chunk_tokens: Count = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Number of steps and repeats, time limits, and optional outputs of the measurement."""

    steps: Count
    warmup_steps: CountOrZero
    warmup_s: SecondsOrZero = 0.0
    min_timed_steps: CountOrZero = 0
    budget_s: SecondsOrZero = 0.0
    """0 in an observed loop, which only `steps` limits."""
    repeats: Count | Literal["auto"] = 1
    repeats_budget_s: SecondsOrZero = 0.0
    reference_budget_s: SecondsOrZero = 0.0
    timeout_s: SecondsOrZero = 0.0
    trace: Flag = True
    keep_traces: Flag = False
    weights: Flag = False
    hang_timeout_s: SecondsOrZero = 0.0
    nvtx: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One configuration with every setting fixed: the unit that is planned, run and stored as a record.

    Field names are the option names of the command line.
    """

    seq_len: Count
    batch: Count
    grad_accum: Count
    strategy: str
    options: tuple[tuple[str, str], ...]
    layout: str
    kernel: str
    dtype: Annotated[str, _one_of(DTYPE_BYTES)]
    model: ModelConfig
    engine: EngineConfig
    trainer: str
    """`own` in an observed loop."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    workload: WorkloadConfig
    data: DataConfig
    mode: str
    hardware: str
    """File in conf/hardware/, or UNKNOWN_HARDWARE."""
    cluster: ClusterConfig
    sp_degree: Count
    ulysses_degree: Count
    dp_replicate: Count
    dp_shard: Count
    checkpointing: bool
    loss: str
    """`own` if user code computes it."""
    measure: MeasureConfig
    seed: CountOrZero
    env: tuple[tuple[str, str], ...]
    experiment: str
    inject_fault: str = NO_FAULT
    """Name of a wrong computation made on purpose, to test that a check finds it."""
    padding: CountOrZero = 0
    """Tokens appended to a sequence so that the layout can divide it. Loss and rates leave them out."""
    tiled_mlp: bool = False
    offload: OffloadConfig = OffloadConfig()
    replay: ReplayConfig = ReplayConfig()
    quality: QualityConfig = QualityConfig()

    def __post_init__(self) -> None:
        if self.data.prompt_tokens >= self.seq_len:
            raise ConfigError(
                f"data.prompt_tokens={self.data.prompt_tokens}: leaves no token of seq_len={self.seq_len} to"
                " train on; choose a smaller number"
            )

    @property
    def running_ranks(self) -> range:
        """Ranks that have a process: all ranks, or the replayed rank alone."""
        rank = self.replay.rank
        return range(self.cluster.world_size) if rank is None else range(rank, rank + 1)

    def option(self, name: str) -> str:
        """Return the value of a strategy option as text; `flag` and `number` convert it."""
        return dict(self.options)[name]

    def flag(self, name: str) -> bool:
        return self.option(name) == "true"

    def number(self, name: str) -> int:
        return int(self.option(name))

    @property
    def dp_degree(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def ring_degree(self) -> int:
        """Number of ranks in a ring: those that share a sequence but do not split its heads.

        It is 1 if `ulysses_degree` exceeds `sp_degree`; such a cell is illegal.
        """
        return max(1, self.sp_degree // self.ulysses_degree)

    @property
    def ring_is_inner(self) -> bool:
        """Whether consecutive ranks, which share a node, form a ring. Otherwise they split the heads."""
        return ("inner", "ring") in self.options

    @property
    def ring_stride(self) -> int:
        """Difference between the numbers of neighbouring ranks in a ring."""
        return 1 if self.ring_is_inner else self.ulysses_degree

    @property
    def ulysses_stride(self) -> int:
        """Difference between the numbers of neighbouring ranks that split the heads."""
        return self.ring_degree if self.ring_is_inner else 1

    def ring_rank(self, sequence_rank: int) -> int:
        """Return the position in its ring of the rank at position `sequence_rank` of its sequence group."""
        return sequence_rank // self.ring_stride % self.ring_degree

    def ulysses_rank(self, sequence_rank: int) -> int:
        """Return the position of a rank among the ranks that split the heads with it.

        Args:
            sequence_rank: Position of the rank in its sequence group.
        """
        return sequence_rank // self.ulysses_stride % self.ulysses_degree

    @property
    def padded_len(self) -> int:
        return self.seq_len + self.padding

    @property
    def shard_len(self) -> int:
        """Tokens of a sequence that one rank holds, including padding."""
        return self.padded_len // self.sp_degree

    @property
    def sequences_per_step(self) -> int:
        """Sequences that all ranks together process in one optimizer step."""
        return self.batch * self.dp_degree * self.grad_accum

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together process in one optimizer step, without padding."""
        return self.seq_len * self.sequences_per_step

    @property
    def cell_id(self) -> str:
        """Hash of `identity()`: twelve hex digits."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """Return all settings that decide what a run of the cell does.

        Left out are the experiment, the number of repeats, budgets of the sweep, `keep_traces` and
        `hang_timeout_s`, and settings that have no effect at their default. A model that a cell of a sweep
        trained is named by this cell, wherever the sweep's folder is.
        """
        fields = asdict(self)
        del fields["experiment"]
        model = fields["model"]
        if self.model.rope_scaling == NOT_USED:
            del model["trained_len"], model["rope_scaling"], model["rope_factor"]
        if self.model.init_std == DEFAULT_INIT_STD:
            del model["init_std"]
        if not self.measure.weights:
            del fields["measure"]["weights"]
        fields["measure"]["gradients"] = False  # a removed setting, in the ids of results/reference
        if self.quality == QualityConfig():
            del fields["quality"]
        path = Path(self.model.path or "")
        if path.name.startswith(TRAINED_PREFIX):
            model["path"] = f"{path.parent.name}/{path.name}"
        for name in ("repeats", "repeats_budget_s", "reference_budget_s", "keep_traces", "hang_timeout_s"):
            del fields["measure"][name]
        return fields

    def identity_without(self, fields: Collection[str], max_tokens: int | None) -> str:
        """Return `identity` without some fields, as JSON. Cells that differ only in these have the same text.

        Args:
            fields: Names of fields of `Cell` to leave out. `data.packing` always stays, because it decides
                which tokens see each other.
            max_tokens: Length that is stored in place of `seq_len` if the sequence is longer; None to store
                every length.
        """
        tokens = self.seq_len if max_tokens is None else min(self.seq_len, max_tokens)
        settings = {name: value for name, value in self.identity().items() if name not in fields}
        return json.dumps({**settings, "seq_len": tokens, "packing": self.data.packing}, sort_keys=True)

    def flat(self) -> dict[str, Any]:
        """Return the cell as a record stores it in `config`: a flat dictionary of JSON values.

        Keys are the option names of the command line. A nested config is stored as its `name`, and its other
        fields as `group.key`.
        """
        flat: dict[str, Any] = {}
        for key, value in asdict(self).items():
            if key in _PAIRS:
                flat |= {f"{_PAIRS[key]}.{name}": text for name, text in value}
            elif isinstance(value, dict):
                flat |= {key: value.pop("name")} if "name" in value else {}
                flat |= {f"{key}.{inner}": leaf for inner, leaf in value.items()}
            else:
                flat[key] = value
        return flat

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> Cell:
        """Return the cell whose settings a record stores.

        Args:
            flat: `config` of a record, as `flat` returns it.

        Returns:
            The cell. Settings that did not exist when the record was made have their default values.

        Raises:
            ConfigError: If a value breaks the rule of its field, or a field without a default is missing.
        """
        pairs = {group: name for name, group in _PAIRS.items()}
        groups = {key.partition(".")[0] for key in flat if "." in key} - {*pairs}
        fields: dict[str, Any] = {group: {} for group in groups} | {name: [] for name in _PAIRS}
        for key, value in flat.items():
            group, _, inner = key.partition(".")
            if group in groups:
                fields[group][inner or "name"] = value
            elif inner:
                fields[pairs[group]].append((inner, value))
            else:
                fields[key] = value
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a valid cell: {error}") from None
