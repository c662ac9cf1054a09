"""One cell, fully resolved: what a record's `config` holds and what every rank is handed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from sys import float_info
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

_PAIRS: Mapping[str, str] = {"options": "strategy", "env": "env"}
"""Fields that are pairs of name and value, and the group their names stand in on the command line."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""They set CUDA's caching allocator; torch reads one of them."""
NOT_USED = "none"
"""A choice that a cell has no use for, such as the engine of one that trains nothing."""
AUTO: Final = "auto"
"""A choice that is left to us."""
UNKNOWN_HARDWARE = "unknown"
"""The hardware of a GPU that no file of conf/hardware/ names: its peak is not known, so it has no MFU."""
NO_MISTAKE = "none"
OWN = "own"
"""A choice that is somebody's own code, not one of the tables'."""
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
LOW_PRECISION = ("bf16", "fp16")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
"""torch's words for CPUs near a GPU, those of torchrun's --numa-binding."""
MASKS = ("causal", "full")
DEALS = ("in_order", "reversed")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
"""Of the learning rate, by transformers' names."""
PACKING = ("none", "documents")
LEAVES = (NOT_USED, "layer")


MAX_WHOLE = 2**40
"""Of tokens and of every other count: seeds and sums over samples stay within 64 bits."""
MAX_SECONDS = 1_000_000
"""Under what the operating system's timers can wait, 2^31 milliseconds."""


def whole_rule(least: int) -> Meta:
    """The rule of a whole number, and the example that a refusal of another value gives."""
    said = f"a whole number from {least} to {MAX_WHOLE}"
    return Meta(ge=least, le=MAX_WHOLE, description=said, examples=[max(least, 2)])


def positive_rule(
    example: float | str, *, or_zero: bool = False, most: float = float_info.max, of: str = ""
) -> Meta:
    """The rule for a finite number above 0, or for one of at least 0."""
    said = f"{'0 or ' if or_zero else ''}a positive number{of}"
    least = 0.0 if or_zero else float_info.min
    return Meta(ge=least, le=most, description=said, examples=[example])


def _one_of(names: Iterable[str]) -> Meta:
    return Meta(pattern=f"^({'|'.join(names)})$")


Count = Annotated[int, whole_rule(1)]
CountOrZero = Annotated[int, whole_rule(0)]
_OF_SECONDS = f" of seconds up to {MAX_SECONDS}"
Seconds = Annotated[float, positive_rule(20, most=MAX_SECONDS, of=_OF_SECONDS)]
SecondsOrZero = Annotated[float, positive_rule(20, or_zero=True, most=MAX_SECONDS, of=_OF_SECONDS)]
Flag = Annotated[bool, Meta(description="true or false", examples=["true"])]


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    """Every cell that could run did; running out of memory and `unsupported` are findings."""
    FAILED = 1
    """Some cell failed, or a command missed its own goal."""
    REQUEST_WRONG = 2
    """The request cannot be carried out, as one line said."""
    INTERRUPTED = 130
    """Ctrl-C, or a scheduler's SIGTERM."""


class Resume(StrEnum):
    """Which of a folder's records a sweep keeps."""

    NEVER = "false"
    """There may be none."""
    MATCHING = "true"
    """Final ones that were made with the code, the packages and the device at hand."""
    ANY = "any"
    """Final ones, whatever they were made with."""


class WhenTaken(StrEnum):
    """What a sweep does while another runs on the same devices."""

    WAIT = "wait"
    REFUSE = "refuse"
    NONE = "none"
    """Take no lease, and run beside the sweep that holds it."""


LEASES = tuple(WhenTaken)


class ConfigError(ValueError):
    """A request that cannot be carried out, in one line: value, rule, way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers a transformer is built from."""

    name: str
    family: str
    path: str | None
    """A local checkpoint, which takes the place of random weights."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    name: str
    """`text` reads `path`, `synthetic` computes tokens."""
    path: str | None
    """Without one, `text` is Python's own documentation."""
    tokenizer: str | None
    prompt_tokens: CountOrZero
    """The labels of so many tokens at the start of a sequence, or of each packed document, do not count."""
    rank_order: Annotated[str, _one_of(DEALS)] = "in_order"
    """Which ranks and micro-steps are given which sequences of a step."""
    packing: Annotated[str, _one_of(PACKING)] = "none"
    """`documents` lays whole documents end to end, which do not see each other; `none` joins the text."""

    @property
    def packs(self) -> bool:
        """Whether a sequence holds several documents."""
        return self.packing == "documents"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The ranks of a cell and what they run on."""

    name: str
    world_size: Count
    ranks_per_gpu: Count
    """Above 1 ranks share a GPU: right for checking results, and its times say nothing."""
    device: str
    backend: str
    """The process-group library: `nccl` or `gloo`."""
    threads_per_rank: Count
    memory_limit_gib: float | None
    """What one rank may allocate: on a GPU in all, on a CPU beyond what it holds once libraries are used."""
    nodes: Count = 1
    """Machines that the ranks are on, as many on each; neighbours in rank share one."""
    network: str | None = None
    """What the user calls the network between them; None on one machine."""
    numa_binding: Annotated[str, _one_of(NUMA_BINDINGS)] | None = None
    """Which CPUs near its GPU a rank is bound to; None for whatever the system gives it."""

    def __post_init__(self) -> None:
        if self.world_size % self.nodes:
            raise ConfigError(
                f"cluster.world_size={self.world_size}: each of cluster.nodes={self.nodes} has as many ranks;"
                f" write for example cluster.world_size={self.nodes * -(-self.world_size // self.nodes)}"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def nodes_of(self, ranks: int) -> int:
        """The fewest nodes that hold so many ranks, as many on each and no more than on those of this one."""
        return next(
            each for each in range(1, ranks + 1) if ranks % each == 0 and ranks // each <= self.ranks_per_node
        )

    def ranks_of(self, node: int) -> range:
        """The ranks that are on a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def device_index(self, local_rank: int) -> int:
        """Which of a host's visible GPUs a rank is on; neighbours in rank share one."""
        return local_rank // self.ranks_per_gpu

    def ranks_beside(self, local_rank: int) -> int:
        """How many other ranks of one host are on this rank's GPU."""
        first = self.device_index(local_rank) * self.ranks_per_gpu
        return min(self.ranks_per_gpu, self.ranks_per_node - first) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What a step is."""

    name: str
    """`train`, or `attention` alone."""
    mask: Annotated[str, _one_of(MASKS)]
    """`causal` or `full`; in training causal."""

    @property
    def trains(self) -> bool:
        """True where a model, an engine and an optimizer are at work, not attention alone."""
        return self.name == "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How parameters, gradients and optimizer state are sharded."""

    name: str
    """`ddp`, `fsdp2` or `zero3`; NOT_USED where nothing is trained."""
    leaf: Annotated[str, _one_of(LEAVES)] = NOT_USED
    """Module that has ZeRO-3's hooks: `layer` for a whole decoder layer, NOT_USED for every module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: str = "adamw"
    """Key in the table of optimizers; NOT_USED where nothing is trained."""
    learning_rate: Annotated[float, positive_rule("1e-3")] = 1e-3
    schedule: Annotated[str, _one_of(SCHEDULES)] = "constant"
    warmup_steps: CountOrZero = 0
    """Optimizer steps until the full learning rate."""
    schedule_steps: Count = 1000
    """Optimizer steps after which a schedule that falls has reached 0."""
    max_grad_norm: Annotated[float, positive_rule("1.0", or_zero=True)] = 1.0
    """Gradients of a larger norm are scaled down to this; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """What is kept in host memory between its uses."""

    activations: Flag = False
    """The checkpointed inputs of the layers."""
    optimizer: Flag = False
    """The optimizer's state, gradients and wide weights, which are then updated there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The one rank that runs where `mode=replay`."""

    rank: CountOrZero | None = None
    """Number of the rank among all ranks of the cell; None where all of them run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """How much of what is measured."""

    steps: Count
    """Timed steps, or fewer where `budget_s` has no room for them."""
    warmup_steps: CountOrZero
    warmup_s: SecondsOrZero
    """Seconds that full-length steps before the clock should last at least, for a GPU's heat and clocks to
    settle; 0 where `warmup_steps` alone counts."""
    min_timed_steps: CountOrZero
    """Timed steps, and a full-length step before them, whatever `budget_s` has room for; 0 where one step may
    have to do."""
    budget_s: SecondsOrZero
    """Seconds that the timed pass should stay within; 0 for an observed loop, which only `steps` limits."""
    repeats: Count | Literal["auto"]
    """How many times a cell is run, each time in fresh processes; AUTO for as often as the next allows."""
    repeats_budget_s: SecondsOrZero
    """Seconds that a whole sweep should stay within where repeats are left open."""
    reference_budget_s: SecondsOrZero
    """Seconds that a cell of `local` may take which runs only for others to be compared with; 0 for none."""
    timeout_s: SecondsOrZero
    """Seconds after which a cell's processes are ended."""
    trace: Flag
    keep_traces: Flag
    gradients: Flag
    """Whether every full gradient of one step is written to a file."""
    hang_timeout_s: SecondsOrZero = 0.0
    """Seconds without any progress of a rank after which a cell's processes are ended before that, if ten of
    its steps take no longer; 0 for none."""
    nvtx: Flag = False
    """Whether ranks on GPUs mark what they do for Nsight Systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell: every choice made, every number known."""

    seq_len: Count
    """Tokens of a whole sequence, before sharding."""
    batch: Count
    """Whole sequences of one micro-step and data-parallel group."""
    grad_accum: Count
    """Micro-steps of a step."""
    strategy: str
    options: tuple[tuple[str, str], ...]
    """The strategy's own choices, such as a rotation: name and value."""
    layout: str
    """Which tokens a rank holds."""
    kernel: str
    """Attention on one device."""
    dtype: Annotated[str, _one_of(DTYPE_BYTES)]
    model: ModelConfig
    engine: EngineConfig
    trainer: str
    """Whose training loop runs."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Cells of before it was a choice had AdamW's defaults."""
    workload: WorkloadConfig
    data: DataConfig
    mode: str
    """`measure`: all ranks run; `replay`: one of them does; `predict`: none does."""
    hardware: str
    cluster: ClusterConfig
    sp_degree: Count
    """Ranks that share a sequence."""
    ulysses_degree: Count
    """How many of these share its heads."""
    dp_replicate: Count
    """Copies of the sharded model."""
    dp_shard: Count
    """Data-parallel groups that share one copy."""
    checkpointing: bool
    loss: str
    measure: MeasureConfig
    seed: CountOrZero
    env: tuple[tuple[str, str], ...]
    """Environment variables of the ranks: name and value."""
    experiment: str
    inject_fault: str = NO_MISTAKE
    """What is done wrong on purpose, to see that it is found."""
    padding: CountOrZero = 0
    """Tokens after a sequence's own that the layout needs; they count neither in the loss nor in rates."""
    tiled_mlp: bool = False
    """Whether each MLP is computed tile by tile along the sequence, and again in backward."""
    offload: OffloadConfig = OffloadConfig()
    replay: ReplayConfig = ReplayConfig()

    def __post_init__(self) -> None:
        if self.data.prompt_tokens >= self.seq_len:
            raise ConfigError(
                f"data.prompt_tokens={self.data.prompt_tokens}: leaves no token of seq_len={self.seq_len} to"
                " train on; stay below it"
            )

    @property
    def running_ranks(self) -> range:
        """The ranks that have a process, in order: all ranks, or in a replay one of them."""
        rank = self.replay.rank
        return range(self.cluster.world_size) if rank is None else range(rank, rank + 1)

    def option(self, name: str) -> str:
        """The value of one of the strategy's own choices."""
        return dict(self.options)[name]

    def flag(self, name: str) -> bool:
        """The value of a choice that is true or false."""
        return self.option(name) == "true"

    def number(self, name: str) -> int:
        """The value of a choice that is a whole number."""
        return int(self.option(name))

    @property
    def dp_degree(self) -> int:
        """Sequences in flight at once: data-parallel groups of `sp_degree` ranks each."""
        return self.dp_replicate * self.dp_shard

    @property
    def ring_degree(self) -> int:
        """Ranks of one ring: those that share a sequence but not its heads.

        One where more ranks should share heads than share a sequence: such a cell is illegal.
        """
        return max(1, self.sp_degree // self.ulysses_degree)

    @property
    def ring_is_inner(self) -> bool:
        """Whether neighbours in rank, which share a node, are of one ring; else they share heads."""
        return ("inner", "ring") in self.options

    @property
    def ring_stride(self) -> int:
        """The difference in rank of neighbours in a ring."""
        return 1 if self.ring_is_inner else self.ulysses_degree

    @property
    def ulysses_stride(self) -> int:
        """The difference in rank of neighbours that exchange heads."""
        return self.ring_degree if self.ring_is_inner else 1

    def ring_rank(self, sequence_rank: int) -> int:
        """A rank's place in its ring, by its place among the ranks of its sequence."""
        return sequence_rank // self.ring_stride % self.ring_degree

    def ulysses_rank(self, sequence_rank: int) -> int:
        """A rank's place among those that exchange heads, by its place among the ranks of its sequence."""
        return sequence_rank // self.ulysses_stride % self.ulysses_degree

    @property
    def padded_len(self) -> int:
        """Tokens of a whole sequence as the model is fed it."""
        return self.seq_len + self.padding

    @property
    def shard_len(self) -> int:
        """Tokens of one sequence that one rank holds, padding included."""
        return self.padded_len // self.sp_degree

    @property
    def sequences_per_step(self) -> int:
        return self.batch * self.dp_degree * self.grad_accum

    @property
    def tokens_per_step(self) -> int:
        """Without padding."""
        return self.seq_len * self.sequences_per_step

    @property
    def cell_id(self) -> str:
        """Twelve hex digits that two cells share exactly when they ask for the same work."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """All that decides what a cell does: repeats, files kept, patience and who asked for it do not."""
        fields = asdict(self)
        del fields["experiment"]
        for name in ("repeats", "repeats_budget_s", "reference_budget_s", "keep_traces", "hang_timeout_s"):
            del fields["measure"][name]
        return fields

    def identity_without(self, fields: Collection[str], max_tokens: int | None) -> str:
        """`identity` without these fields, as one text; lengths beyond `max_tokens` count as that."""
        tokens = self.seq_len if max_tokens is None else min(self.seq_len, max_tokens)
        decides = {name: value for name, value in self.identity().items() if name not in fields}
        # Whatever the tokens are, packing decides which of them see each other.
        return json.dumps({**decides, "seq_len": tokens, "packing": self.data.packing}, sort_keys=True)

    def flat(self) -> dict[str, Any]:
        """The record's `config`, plain JSON values: choices as strings by the command line's names, the rest
        as `group.key`.
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
        """The cell that has this `config` in its record; raises ConfigError for one that no cell can have."""
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
            raise ConfigError(f"this is no cell: {error}") from None
