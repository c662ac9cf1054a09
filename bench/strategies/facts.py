"""What is known of a strategy without running it: which cells are legal, how many bytes it sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from bench.attention.layouts import LAYOUTS
from bench.config import DTYPE_BYTES, Cell, ModelConfig
from bench.strategies.options import Option
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import WIDE_BYTES, Schedule, wide


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Bytes that one call of attention takes on a rank, beyond Q, K and V."""

    forward: int
    """At the fullest moment of forward."""
    kept: int
    """From forward to backward, the output among it."""
    backward: int
    """At the fullest moment of backward, beyond what is kept; the gradients of Q, K and V among it."""


class StrategyFacts(ABC):
    """One strategy's facts."""

    name: ClassVar[str]
    """Its key in the table, its folder and its YAML."""
    style: ClassVar[PlotStyle | None] = None
    """Colour, marker and line in figures, unlike those of all others; None leaves them to the name."""
    layouts: ClassVar[tuple[str, ...]] = ("contiguous",)
    """Which tokens a rank may hold, the default first."""
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPE_BYTES)
    """The dtypes it can run in."""
    takes_fewer_kv_heads: ClassVar[bool] = True
    """Whether there may be fewer KV heads than ranks that share heads: it repeats them then."""
    package: ClassVar[str | None] = None
    """The distribution whose code runs; None where it is ours."""
    tried: ClassVar[str | None] = None
    """The version of it that passed the gates, where it is no requirement of ours; None where any will do."""
    shares_sequences: ClassVar[bool] = True
    """Whether ranks share a sequence at all; false only for `local`."""
    is_hybrid: ClassVar[bool] = False
    """Whether `ulysses_degree` is a choice: some of the ranks share heads, and groups of them form a ring."""
    options: ClassVar[Mapping[str, Option]] = {}
    """Choices of this strategy alone, `strategy.<key>` on the command line; the YAML names the default."""
    kernels: ClassVar[tuple[str, ...] | None] = None
    """The kernels it can run on; None where any will do."""
    is_unfused: ClassVar[bool] = False
    """Whether it calls no kernel, but takes scores itself: `unfused_block` of the cost model says how."""
    packs: ClassVar[bool] = False
    """Whether its attention stays within the documents of packed sequences, wherever they end."""
    why_it_packs_not: ClassVar[str] = "its attention is not told where documents end"
    """The reason, where it does not."""
    why_no_full_mask: ClassVar[str] = ""
    """Reason that a refusal of the full mask gives; empty for none."""
    kept_copies: ClassVar[tuple[int, int]] = (0, 0)
    """How many tensors of all query heads, and of all KV heads, are saved beyond Q, K, V and the output."""
    sends_unevenly: ClassVar[bool] = False
    """Whether ranks that share a sequence send different amounts: `rank_schedule` has each rank's."""

    @property
    def default_layout(self) -> str:
        return self.layouts[0]

    def layouts_with(self, options: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """Which of its layouts go with these choices of its own, the default first."""
        return self.layouts

    @property
    def is_optional(self) -> bool:
        """Whether its package is no requirement of ours: then nothing takes it that does not name it."""
        return self.tried is not None

    @property
    def install(self) -> str:
        """The command that installs its package."""
        return f"pip install {self.package}" + ("" if self.tried is None else f"=={self.tried}")

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:  # noqa: ARG002
        """How many of the ranks that share a sequence share its heads, unless the user says so."""
        return 1

    def causal_masks(self, layout: str) -> tuple[bool, ...]:  # noqa: ARG002
        """Whether attention can be causal (True) and full (False) in this layout."""
        return (True, False)

    def kept_bytes_per_token(self, cell: Cell) -> int:
        """Bytes of each of a rank's tokens that attention saves beyond Q, K, V, the output and its LSE."""
        q_copies, kv_copies = self.kept_copies
        heads = q_copies * cell.model.num_heads + kv_copies * kv_heads_held(cell)
        return heads * cell.model.head_dim * DTYPE_BYTES[cell.dtype]

    def slices(self, cell: Cell, seq_len: int, group_rank: int) -> tuple[slice, ...]:
        """The pieces of a whole sequence that a rank of the sequence group holds, in its local order."""
        return LAYOUTS[cell.layout].slices(seq_len, cell.sp_degree, group_rank)

    def length_multiple(self, cell: Cell) -> int:
        """What `seq_len` has to be a multiple of."""
        return LAYOUTS[cell.layout].length_multiple(cell.sp_degree)

    def refusals(self, cell: Cell) -> list[str]:
        """Why this cell cannot run, each with a way out; empty when it can."""
        unlisted = [
            *_not_among("layout", cell.layout, self.layouts_with(dict(cell.options)), self.name),
            *_not_among("dtype", cell.dtype, self.dtypes, self.name),
            *_not_among("kernel", cell.kernel, self.kernels or (cell.kernel,), self.name),
            *self.mask_refusals(cell),
            *self.packing_refusals(cell),
        ]
        degrees = self.degree_refusals(cell)
        if degrees:  # without a ring or a Ulysses group there is no length or head count to speak of
            return [*unlisted, *degrees]
        return [
            *unlisted,
            *_not_divisible(cell, self.length_multiple(cell)),
            *self.head_refusals(cell),
        ]

    def autocast_refusals(self, cell: Cell) -> list[str]:  # noqa: ARG002
        """Return why attention cannot run under autocast, which rounds its products; empty where it can."""
        return []

    def mask_refusals(self, cell: Cell) -> list[str]:
        if (cell.workload.mask == "causal") in self.causal_masks(cell.layout):
            return []
        reason = f" ({self.why_no_full_mask})" if self.why_no_full_mask else ""
        who = f"{self.name} in {cell.layout} layout{reason}"
        return [f"workload.mask=full is not for {who}; take workload.mask=causal"]

    def packing_refusals(self, cell: Cell) -> list[str]:
        if not cell.data.packs:
            return []
        if not cell.workload.trains:
            way_out = "take workload=train, or data.packing=none"
            return [f"data.packing=documents is not for workload={cell.workload.name}; {way_out}"]
        if self.packs:
            return []
        way_out = "take strategy=ulysses or ring, or data.packing=none"
        return [f"data.packing=documents is not for {self.name} ({self.why_it_packs_not}); {way_out}"]

    def degree_refusals(self, cell: Cell) -> list[str]:
        """Why `ulysses_degree` is not legal: only a hybrid has a choice of degrees."""
        fixed = self.ulysses_degree(cell.sp_degree, cell.model)
        if cell.ulysses_degree == fixed:
            return []
        return [f"ulysses_degree={cell.ulysses_degree} is for strategy=usp; leave ulysses_degree=auto"]

    def head_refusals(self, cell: Cell) -> list[str]:  # noqa: ARG002  most strategies take any heads
        return []

    def balances(self, cell: Cell) -> bool:  # noqa: ARG002
        """Whether ranks share the causal mask's work evenly although their layout does not."""
        return False

    def recomputes_attention(self, cell: Cell) -> bool:
        """Whether attention runs forward once more in backward."""
        return cell.checkpointing

    def checkpointed_bytes(self, cell: Cell) -> int:  # noqa: ARG002
        """What a checkpointed layer keeps of attention beside its own input, in bytes."""
        return 0

    def forwards_per_step(self, cell: Cell) -> int:
        """How often attention runs forward in one step."""
        return (2 if self.recomputes_attention(cell) else 1) * backwards_per_step(cell)

    def scores_bytes(self, cell: Cell) -> int:
        """Beside what it saves, scores in memory at once: of `kernel=math` a block's, three times wide."""
        if cell.kernel != "math":
            return 0
        block = cell.padded_len // cell.ring_degree
        scores = cell.batch * cell.model.num_heads // cell.ulysses_degree * block**2
        return 3 * max(WIDE_BYTES, DTYPE_BYTES[cell.dtype]) * scores

    def call_memory(self, cell: Cell) -> CallMemory | None:  # noqa: ARG002
        """What one call of attention takes; None where that is not known."""
        return None

    @abstractmethod
    def communication_bytes(self, cell: Cell) -> int:
        """Attention-exchange payload in one optimizer step, in bytes, of the rank that sends most."""

    def rank_communication_bytes(self, cell: Cell, rank: int) -> int:  # noqa: ARG002
        """Attention-exchange payload of one rank in one optimizer step, in bytes."""
        return self.communication_bytes(cell)

    def extreme_ranks(self, cell: Cell) -> Collection[int]:
        """Ranks that share a sequence, among them one that sends most and one that takes most memory."""
        return range(cell.sp_degree) if self.sends_unevenly else (0,)

    def schedule(self, cell: Cell) -> Schedule | None:  # noqa: ARG002
        """What one call of attention computes and sends; None where that is not known, and no time either."""
        return None

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule | None:  # noqa: ARG002
        """What one call of attention computes and sends on this rank, where ranks send unevenly."""
        return self.schedule(cell)


class ScheduledFacts(StrategyFacts):
    """Facts of a strategy whose bytes follow from its schedule."""

    @abstractmethod
    def schedule(self, cell: Cell) -> Schedule:
        """What one call of attention computes and sends, on the rank that has most to do."""

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:  # noqa: ARG002
        """What one call of attention computes and sends on this rank, where ranks send unevenly."""
        return self.schedule(cell)

    def communication_bytes(self, cell: Cell) -> int:
        """That of all layers and micro-steps, and of forward once more where it is computed again."""
        return max(self.rank_communication_bytes(cell, rank) for rank in self.extreme_ranks(cell))

    def rank_communication_bytes(self, cell: Cell, rank: int) -> int:
        once = self.rank_schedule(cell, rank)
        forward = once.forward_bytes * self.forwards_per_step(cell)
        return forward + once.backward_bytes * backwards_per_step(cell)


def activation_bytes(cell: Cell, heads: int) -> int:
    """Bytes of one rank's [batch, heads, shard_len, head_dim] tensor."""
    return cell.batch * heads * cell.shard_len * cell.model.head_dim * DTYPE_BYTES[cell.dtype]


def lse_bytes(cell: Cell) -> int:
    """Bytes of the LSE of one rank's tokens and all query heads; in float32 at least."""
    return wide(cell, activation_bytes(cell, cell.model.num_heads)) // cell.model.head_dim


def repeats_kv(cell: Cell) -> bool:
    """Whether KV heads are repeated just before the kernel, to as many as query heads: a CPU's want that."""
    return cell.cluster.device == "cpu" and cell.model.num_kv_heads < cell.model.num_heads


def forwards_per_step(cell: Cell) -> int:
    """How often attention runs forward in one step: once more per layer where it is checkpointed."""
    return (2 if cell.checkpointing else 1) * cell.model.num_layers * cell.grad_accum


def backwards_per_step(cell: Cell) -> int:
    """How often attention runs backward in one step: once per layer and micro-step."""
    return cell.model.num_layers * cell.grad_accum


def all_to_all_head_refusals(cell: Cell, *, repeats: bool) -> list[str]:
    """Ulysses gives each rank whole heads, so their number sets its limit.

    KV heads may be fewer than ranks where the strategy `repeats` them.
    """
    heads, kv_heads, degree = cell.model.num_heads, cell.model.num_kv_heads, cell.ulysses_degree
    key = "ulysses_degree" if cell.ring_degree > 1 else "sp_degree"
    divisors = [
        d
        for d in range(1, heads + 1)
        if heads % d == 0 and (kv_heads % d == 0 or (repeats and d % kv_heads == 0))
    ]
    if degree in divisors:
        return []
    reason = (
        f"{cell.strategy} cannot split {heads} query and {kv_heads} KV heads evenly over {key}={degree}"
        f" ranks; choose {key} from {', '.join(map(str, divisors))}, or a ring strategy"
    )
    return [reason]


def exchanged_kv_heads(cell: Cell) -> int:
    """KV heads that are sent: repeated up to one per rank where there are fewer heads than ranks."""
    return max(cell.model.num_kv_heads, cell.ulysses_degree)


def kv_heads_held(cell: Cell) -> int:
    """KV heads of a token that a rank computes with: repeated where several ranks share heads."""
    return exchanged_kv_heads(cell) if cell.ulysses_degree > 1 else cell.model.num_kv_heads


def _not_among(key: str, value: str, known: tuple[str, ...], strategy: str) -> list[str]:
    if value in known:
        return []
    return [f"{key}={value} is not for {strategy}; choose {key}={' or '.join(known)}"]


def _not_divisible(cell: Cell, multiple: int) -> list[str]:
    if cell.padded_len % multiple == 0:
        return []
    near = max(multiple, round(cell.seq_len / multiple) * multiple)
    who = f"{cell.strategy} in {cell.layout} layout"
    padded = ", or take pad=true" if cell.workload.trains else ""
    way_out = f"the nearest is seq_len={near}{padded}"
    return [f"seq_len={cell.seq_len} must be a multiple of {multiple} for {who}; {way_out}"]
