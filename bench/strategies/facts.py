"""Facts that are known of a strategy without running it, such as its legal cells and the bytes it sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from bench.attention.layouts import LAYOUTS
from bench.config import DTYPE_BYTES, Cell, ModelConfig
from bench.strategies.options import Option
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import WIDE_NUMBER_BYTES, Schedule, wide_bytes


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Bytes that one call of attention allocates on a rank, in addition to Q, K and V."""

    forward: int
    """Peak bytes during forward."""
    saved: int
    """Bytes that stay allocated from forward to backward, including the output."""
    backward: int
    """Peak bytes during backward in addition to `saved`, including the gradients of Q, K and V."""


class StrategyFacts(ABC):
    """Facts of one strategy, which planning and analysis read without importing torch.

    A subclass sets `name` and defines `communication_bytes`. Inherit from `ScheduledFacts` instead if the
    stages of a call are known:

        class MyRingFacts(ScheduledFacts):
            name = "my_ring"
            layouts = ("zigzag", "contiguous")

            def schedule(self, cell: Cell) -> Schedule: ...
    """

    name: ClassVar[str]
    """Name of the strategy on the command line, also of its folder and of its YAML in conf/strategy/."""
    style: ClassVar[PlotStyle | None] = None
    """Colour, marker and line in figures, different for every strategy; None derives them from `name`."""
    layouts: ClassVar[tuple[str, ...]] = ("contiguous",)
    """Layouts that the strategy supports, the default first."""
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPE_BYTES)
    """Dtypes that the strategy supports."""
    repeats_kv_heads: ClassVar[bool] = True
    """Whether KV heads are repeated if there are fewer of them than ranks that share heads.

    If False, such a cell is refused.
    """
    package: ClassVar[str | None] = None
    """Distribution whose code computes attention; None if the code is in this repository."""
    tested_version: ClassVar[str | None] = None
    """Version of `package` that passed the checks here, if this repository does not require the package.

    None if this repository requires it, or if no package is used.
    """
    shares_sequences: ClassVar[bool] = True
    """Whether several ranks share a sequence; False only for `local`."""
    is_hybrid: ClassVar[bool] = False
    """Whether the user can choose `ulysses_degree`.

    Groups of `ulysses_degree` ranks then share heads, and a ring connects the groups.
    """
    options: ClassVar[Mapping[str, Option]] = {}
    """Options of this strategy only, `strategy.<key>` on the command line; the YAML holds their defaults."""
    kernels: ClassVar[tuple[str, ...] | None] = None
    """Kernels that the strategy can call; None if it can call any."""
    flash_attn_kernels: ClassVar[tuple[str, ...]] = ()
    """Kernels with which the strategy's package calls flash-attention itself, and not our stand-in for
    flash-attn; empty if it does not call flash-attn."""
    is_unfused: ClassVar[bool] = False
    """Whether the strategy computes scores itself and calls no kernel.

    `unfused_block` (`bench/extras/predict/operations.py`) is then the model of its time.
    """
    supports_documents: ClassVar[bool] = False
    """Whether attention stays within the documents of packed sequences, wherever the documents end."""
    no_documents_reason: ClassVar[str] = "its attention does not receive the boundaries of documents"
    """Reason in the refusal of packed documents if `supports_documents` is False."""
    no_full_mask_reason: ClassVar[str] = ""
    """Reason in the refusal of the full mask; empty for none."""
    saved_copies: ClassVar[tuple[int, int]] = (0, 0)
    """Number of tensors saved for backward in addition to Q, K, V and the output.

    The first number counts tensors of all query heads, the second tensors of all KV heads.
    """
    sends_unevenly: ClassVar[bool] = False
    """Whether the ranks of a sequence group send different amounts, which `rank_schedule` then states."""

    @property
    def default_layout(self) -> str:
        """The layout of a cell whose layout the user leaves open."""
        return self.layouts[0]

    def layouts_with(self, options: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the layouts that are legal with these options of the strategy, the default first."""
        return self.layouts

    @property
    def install_command(self) -> str:
        """The command that installs the package."""
        return f"pip install {self.package}" + (
            "" if self.tested_version is None else f"=={self.tested_version}"
        )

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:  # noqa: ARG002
        """Return the number of ranks over which the heads of a sequence are split.

        For a hybrid it is the default of `ulysses_degree`, which the user can change.

        Args:
            sp_degree: Number of ranks that share a sequence; the result divides it.
            model: Model whose heads are split.
        """
        return 1

    def causal_masks(self, layout: str) -> tuple[bool, ...]:  # noqa: ARG002
        """Return the supported masks in this layout: True for causal, False for full attention."""
        return (True, False)

    def saved_bytes_per_token(self, cell: Cell) -> int:
        """Return the bytes per token of a rank's shard that attention saves for backward.

        Q, K, V, the output and its LSE are not counted. The default is the size of `saved_copies`.
        """
        q_copies, kv_copies = self.saved_copies
        heads = q_copies * cell.model.num_heads + kv_copies * kv_heads_with_repeats(cell)
        return heads * cell.model.head_dim * DTYPE_BYTES[cell.dtype]

    def slices(self, cell: Cell, seq_len: int, group_rank: int) -> tuple[slice, ...]:
        """Return the slices of a whole sequence that a rank holds, in the order in which its shard has them.

        Args:
            cell: Cell with the layout and the number of ranks.
            seq_len: Number of tokens of the whole sequence, a multiple of `length_multiple(cell)`.
            group_rank: The rank's number in its sequence group.
        """
        return LAYOUTS[cell.layout].slices(seq_len, cell.sp_degree, group_rank)

    def length_multiple(self, cell: Cell) -> int:
        """Return the number that must divide `seq_len`."""
        return LAYOUTS[cell.layout].length_multiple(cell.sp_degree)

    def refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which the cell cannot run; empty if it can.

        A reason is one line with the value, the rule and a way out. An override adds its own reasons to
        `super().refusals(cell)`.
        """
        refusals = [
            *_not_among("layout", cell.layout, self.layouts_with(dict(cell.options)), self.name),
            *_not_among("dtype", cell.dtype, self.dtypes, self.name),
            *_not_among("kernel", cell.kernel, self.kernels or (cell.kernel,), self.name),
            *self.mask_refusals(cell),
            *self.packing_refusals(cell),
        ]
        degrees = self.degree_refusals(cell)
        if degrees:  # lengths and heads are checked against legal degrees only
            return [*refusals, *degrees]
        return [
            *refusals,
            *_not_divisible(cell, self.length_multiple(cell)),
            *self.head_refusals(cell),
        ]

    def autocast_refusals(self, cell: Cell) -> list[str]:  # noqa: ARG002
        """Return the reasons for which attention cannot run under autocast, which rounds matrix products.

        They count only if the cell's engine uses autocast, as DDP does in bf16.
        """
        return []

    def mask_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which `workload.mask` is not legal; see `causal_masks`."""
        if (cell.workload.mask == "causal") in self.causal_masks(cell.layout):
            return []
        reason = f" ({self.no_full_mask_reason})" if self.no_full_mask_reason else ""
        refused_by = f"{self.name} in {cell.layout} layout{reason}"
        return [f"workload.mask=full is not for {refused_by}; take workload.mask=causal"]

    def packing_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which `data.packing=documents` is not legal; see `supports_documents`."""
        if not cell.data.packs:
            return []
        if not cell.workload.trains:
            way_out = "take workload=train, or data.packing=none"
            return [f"data.packing=documents is not for workload={cell.workload.name}; {way_out}"]
        if self.supports_documents:
            return []
        way_out = "take strategy=ulysses or ring, or data.packing=none"
        return [f"data.packing=documents is not for {self.name} ({self.no_documents_reason}); {way_out}"]

    def degree_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which `ulysses_degree` is not legal; only hybrids let the user choose it."""
        only_degree = self.ulysses_degree(cell.sp_degree, cell.model)
        if cell.ulysses_degree == only_degree:
            return []
        return [f"ulysses_degree={cell.ulysses_degree} is for strategy=usp; leave ulysses_degree=auto"]

    def head_refusals(self, cell: Cell) -> list[str]:  # noqa: ARG002  most strategies take any heads
        """Return the reasons for which the model's number of heads is not legal."""
        return []

    def balances_causal_area(self, cell: Cell) -> bool:  # noqa: ARG002
        """Return whether ranks compute equal causal areas although the layout gives them unequal ones."""
        return False

    def recomputes_attention(self, cell: Cell) -> bool:
        """Return whether backward runs the forward of attention once more."""
        return cell.checkpointing

    def checkpointed_bytes(self, cell: Cell) -> int:  # noqa: ARG002
        """Return the bytes of attention that a checkpointed layer saves in addition to its input."""
        return 0

    def forwards_per_step(self, cell: Cell) -> int:
        """Return the number of forward calls of attention on a rank in one optimizer step."""
        return (2 if self.recomputes_attention(cell) else 1) * backwards_per_step(cell)

    def scores_bytes(self, cell: Cell) -> int:
        """Return the bytes of scores that are in memory at once while attention runs.

        Saved tensors are not counted. The default is 0 for fused kernels. For `kernel=math` it is three
        tensors of one block's scores, in float32 or wider.
        """
        if cell.kernel != "math":
            return 0
        block = cell.padded_len // cell.ring_degree
        scores = cell.batch * cell.model.num_heads // cell.ulysses_degree * block**2
        return 3 * max(WIDE_NUMBER_BYTES, DTYPE_BYTES[cell.dtype]) * scores

    def call_memory(self, cell: Cell) -> CallMemory | None:  # noqa: ARG002
        """Return the memory of one call of attention, or None if it has to be estimated from `schedule`."""
        return None

    @abstractmethod
    def communication_bytes(self, cell: Cell) -> int:
        """Return the bytes that attention sends in one optimizer step, on the rank that sends most.

        The engagement check compares them with the bytes that were sent.
        """

    def rank_communication_bytes(self, cell: Cell, rank: int) -> int:  # noqa: ARG002
        """Return the bytes that attention sends in one optimizer step, on one rank of the sequence group."""
        return self.communication_bytes(cell)

    def extreme_ranks(self, cell: Cell) -> Collection[int]:
        """Return some ranks of a sequence group, including the ones that send most and need most memory."""
        return range(cell.sp_degree) if self.sends_unevenly else (0,)

    def schedule(self, cell: Cell) -> Schedule | None:  # noqa: ARG002
        """Return the stages of one call of attention on the rank with most work.

        Returns:
            None if the stages are unknown. No time is then predicted.
        """
        return None

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule | None:  # noqa: ARG002
        """Return the stages of one call of attention on one rank of the sequence group, given by its number.

        Override it together with `sends_unevenly`.
        """
        return self.schedule(cell)


class ScheduledFacts(StrategyFacts):
    """Facts of a strategy whose communication bytes follow from its schedule.

    A subclass sets `name` and defines `schedule`:

        def schedule(self, cell: Cell) -> Schedule:
            sent_bytes = (cell.sp_degree - 1) * activation_bytes(cell, 2 * cell.model.num_kv_heads)
            gather = Stage(communications=(Communication("all_gather", sent_bytes, cell.sp_degree),))
            attention = Stage(tuple(ring_blocks(cell, cell.model.num_heads, cell.model.num_kv_heads)))
            scatter = Stage(communications=(Communication("reduce_scatter", sent_bytes, cell.sp_degree),))
            return Schedule(forward=(gather, attention), backward=(attention, scatter))
    """

    @abstractmethod
    def schedule(self, cell: Cell) -> Schedule:
        """Return the stages of one call of attention on the rank with most work."""

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:  # noqa: ARG002
        """Return the stages of one call of attention on one rank.

        Override it together with `sends_unevenly`.
        """
        return self.schedule(cell)

    def communication_bytes(self, cell: Cell) -> int:
        """Return the largest `rank_communication_bytes` of the sequence group."""
        return max(self.rank_communication_bytes(cell, rank) for rank in self.extreme_ranks(cell))

    def rank_communication_bytes(self, cell: Cell, rank: int) -> int:
        """Return the bytes of `rank_schedule` in all layers and micro-steps, with recomputed forwards."""
        call = self.rank_schedule(cell, rank)
        forward = call.forward_bytes * self.forwards_per_step(cell)
        return forward + call.backward_bytes * backwards_per_step(cell)


def activation_bytes(cell: Cell, heads: int) -> int:
    """Return the bytes of one rank's [batch, heads, shard_len, head_dim] tensor in the cell's dtype.

    For K and V together, pass `heads=2 * num_kv_heads`:

        >>> bench.activation_bytes(cell, heads=2 * cell.model.num_kv_heads)
        524288
    """
    return cell.batch * heads * cell.shard_len * cell.model.head_dim * DTYPE_BYTES[cell.dtype]


def lse_bytes(cell: Cell) -> int:
    """Return the bytes of the LSE of one rank's tokens and all query heads, in float32 or wider."""
    return wide_bytes(cell, activation_bytes(cell, cell.model.num_heads)) // cell.model.head_dim


def kernel_repeats_kv(cell: Cell) -> bool:
    """Return whether KV heads are repeated to the number of query heads, which CPU kernels require."""
    return cell.cluster.device == "cpu" and cell.model.num_kv_heads < cell.model.num_heads


def forwards_per_step(cell: Cell) -> int:
    """Return the number of forward calls of attention on a rank in one optimizer step.

    It is layers x micro-steps, twice that with activation checkpointing.

        >>> bench.forwards_per_step(cell), bench.forwards_per_step(replace(cell, checkpointing=True))
        (1, 2)
    """
    return (2 if cell.checkpointing else 1) * cell.model.num_layers * cell.grad_accum


def backwards_per_step(cell: Cell) -> int:
    """Return the number of backward calls of attention in one optimizer step, layers x micro-steps.

    >>> bench.backwards_per_step(replace(cell, grad_accum=4))
    4
    """
    return cell.model.num_layers * cell.grad_accum


def all_to_all_head_refusals(cell: Cell, *, repeats: bool) -> list[str]:
    """Return the reasons for which the heads cannot be split over `ulysses_degree` ranks.

    Args:
        cell: Cell to check.
        repeats: Whether the strategy repeats KV heads if there are fewer of them than ranks.
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


def sent_kv_heads(cell: Cell) -> int:
    """Return the number of KV heads that an all-to-all sends, at least one per rank."""
    return max(cell.model.num_kv_heads, cell.ulysses_degree)


def kv_heads_with_repeats(cell: Cell) -> int:
    """Return the number of KV heads that all ranks together compute with, including repeated heads."""
    return sent_kv_heads(cell) if cell.ulysses_degree > 1 else cell.model.num_kv_heads


def _not_among(key: str, value: str, supported: tuple[str, ...], strategy: str) -> list[str]:
    if value in supported:
        return []
    return [f"{key}={value} is not for {strategy}; choose {key}={' or '.join(supported)}"]


def _not_divisible(cell: Cell, multiple: int) -> list[str]:
    if cell.padded_len % multiple == 0:
        return []
    nearest = max(multiple, round(cell.seq_len / multiple) * multiple)
    refused_by = f"{cell.strategy} in {cell.layout} layout"
    padded = ", or take pad=true" if cell.workload.trains else ""
    way_out = f"the nearest is seq_len={nearest}{padded}"
    return [f"seq_len={cell.seq_len} must be a multiple of {multiple} for {refused_by}; {way_out}"]
