"""Base class of strategies on a rank, and the wiring that connects one with a trainer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.documents import Documents
from bench.attention.kernels import Packing, attend
from bench.attention.packed import attend_packed, copy_to_device, packing_of
from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.ranks.groups import RankGroups
from bench.ranks.log import RefusedError
from bench.strategies.facts import StrategyFacts
from bench.strategies.package_errors import import_kernel, refuse_package_errors

CheckpointContexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
IGNORED_LABEL = -100
# The name contains neither "flash" nor "sdpa", because transformers treats such names specially.
ATTENTION_NAME = "bench_attention"
IGNORED_KEYWORDS = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)
"""Keywords that transformers passes and that do not change the output of causal attention."""

PLAIN_VALUE_TESTS: Mapping[str, Callable[[Any, int], bool]] = {
    "dropout": lambda value, _: not value,
    "scaling": lambda value, head_dim: value is None or math.isclose(value, head_dim**-0.5, rel_tol=1e-6),
    "is_causal": lambda value, _: value is not False,
}
"""Predicates by keyword: whether its value, given the head size, asks for no more than causal attention."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of B whole sequences, or of their shards, of S tokens."""

    samples: Tensor
    """Sample number of every sequence, [B], in host memory."""
    input_ids: Tensor
    """Tokens, [B, S]."""
    labels: Tensor
    """Labels, [B, S], shifted before sharding: the label of token i is token i+1, or IGNORED_LABEL."""
    position_ids: Tensor
    """Positions in the whole sequence, or in the document if documents are packed, [B, S]."""
    documents: Documents | None = None
    """Ends of the documents in the whole sequences, also for a shard; None without packed documents."""

    def to_device(self, device: torch.device) -> Batch:
        """Return the batch on a device without waiting for the copy; `samples` stay in host memory."""
        tensors = (self.input_ids, self.labels, self.position_ids)
        ids, labels, positions = (copy_to_device(tensor, device) for tensor in tensors)
        return Batch(self.samples, ids, labels, positions, self.documents)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Values of an installed strategy that its trainer needs."""

    attention_name: str
    """Name under which transformers finds the attention, the model's `_attn_implementation`."""
    shards_batch: bool
    """Whether the trainer must apply `Strategy.shard` to whole batches."""
    gradient_divisor: int
    """Number of ranks over which the engine averages gradients; a rank's loss is multiplied by it."""


@contextmanager
def register_attention(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Register an attention function with transformers inside the context, and restore the previous one.

    A model finds it by `name`, its `_attn_implementation`. `function` has transformers' attention interface.
    """
    was_local, previous = name in ALL_ATTENTION_FUNCTIONS._local_mapping, ALL_ATTENTION_FUNCTIONS.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        if was_local:
            ALL_ATTENTION_FUNCTIONS[name] = previous
        else:
            del ALL_ATTENTION_FUNCTIONS[name]


class Strategy(ABC):
    """Strategy on one rank.

    A subclass defines `attention`, and its module assigns the subclass to `STRATEGY`:

        class MyAttention(Strategy):
            def attention(self, q_BNSD, k_BKSD, v_BKSD, *, causal=True):
                ...  # communicate over self.groups.sequence, compute with self.kernel

        STRATEGY = MyAttention

    The constructor sets `cell`, `facts`, `groups` (the process groups) and `kernel` (the user's kernel).
    While a batch of packed documents is computed, `documents` and `packing` hold its boundaries; otherwise
    they are None.
    """

    checkpoint_contexts: CheckpointContexts | None = None
    """`context_fn` of `torch.utils.checkpoint`: contexts of the first and the repeated forward of a layer."""

    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        self.cell = cell
        self.facts = facts
        self.groups = groups
        self.kernel = import_kernel(cell.kernel)
        self.watch: AttentionWatch | None = None
        self.documents: Documents | None = None
        self.packing: Packing | None = None
        """The boundaries of `documents` as kernels take them for whole sequences."""
        with refuse_package_errors(facts):
            self.load_package()

    def load_package(self) -> None:  # noqa: B027  optional
        """Import the package that computes attention and look up its functions.

        The constructor calls it last. An error that it raises makes the cell `unsupported`.
        """

    @property
    def package_name(self) -> str:
        """Name of the Python package that contains the strategy's modules."""
        return type(self).__module__.rpartition(".")[0]

    @abstractmethod
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        """Return attention of this rank's queries to the keys of the whole sequence, differentiable.

        Args:
            q_BNSD: Queries of this rank's shard, [batch, query heads, shard_len, head_dim], in the cell's
                layout.
            k_BKSD: Keys of this rank's shard, [batch, KV heads, shard_len, head_dim].
            v_BKSD: Values of this rank's shard, [batch, KV heads, shard_len, head_dim].
            causal: Whether a query attends only to its own and earlier tokens of the sequence.

        Returns:
            The output of this rank's shard, [batch, query heads, shard_len, head_dim], in the dtype of the
            queries.
        """

    def attend_whole(self, q_BMTD: Tensor, k_BLTD: Tensor, v_BLTD: Tensor, *, causal: bool) -> Tensor:
        """Return attention of M query heads to L KV heads over whole sequences of T tokens, [B, M, T, D].

        If documents are packed, attention stays within them and is always causal.
        """
        if self.packing is not None:
            return attend_packed(q_BMTD, k_BLTD, v_BLTD, kernel=self.kernel, packing=self.packing)
        return attend(q_BMTD, k_BLTD, v_BLTD, kernel=self.kernel, causal=causal)

    def log_sum_exp(
        self,
        q_BNSD: Tensor,  # noqa: ARG002
        k_BKSD: Tensor,  # noqa: ARG002
        v_BKSD: Tensor,  # noqa: ARG002
        *,
        causal: bool = True,  # noqa: ARG002
    ) -> Tensor | None:
        """Return the LSE of this rank's queries over all keys, [batch, query heads, shard_len].

        The default returns None, which means that the strategy's code does not expose the LSE. Otherwise the
        parity check compares the LSE, too. Arguments are those of `attention`.
        """
        return None

    def slices(self, seq_len: int) -> tuple[slice, ...]:
        """Return the slices of a whole sequence of `seq_len` tokens that this rank holds, in shard order."""
        return self.facts.slices(self.cell, seq_len, self.groups.sequence_rank)

    def shard(self, batch: Batch) -> Batch:
        """Return this rank's shard of a batch of whole sequences."""
        pieces = self.slices(batch.input_ids.shape[1])
        ids, labels, positions = (
            torch.cat([whole[:, piece] for piece in pieces], dim=1)
            for whole in (batch.input_ids, batch.labels, batch.position_ids)
        )
        return Batch(batch.samples, ids, labels, positions, batch.documents)

    def unshard(self, shards: list[Tensor]) -> Tensor:
        """Return whole sequences, [B, T, ...] in token order.

        Args:
            shards: Shard of every rank of the sequence group, [B, S, ...] each, in the order of ranks.
        """
        seq_len = sum(shard.shape[1] for shard in shards)
        whole = shards[0].new_empty(shards[0].shape[0], seq_len, *shards[0].shape[2:])
        for rank, shard in enumerate(shards):
            pieces = self.facts.slices(self.cell, seq_len, rank)
            sizes = [len(range(seq_len)[piece]) for piece in pieces]
            for piece, part in zip(pieces, shard.split(sizes, dim=1), strict=True):
                whole[:, piece] = part
        return whole

    @contextmanager
    def install(self) -> Iterator[Wiring]:
        """Register the attention with transformers inside the context and yield the trainer's wiring."""
        with register_attention(ATTENTION_NAME, self._transformers_attention):
            yield Wiring(
                attention_name=ATTENTION_NAME,
                shards_batch=self.cell.sp_degree > 1,
                gradient_divisor=self.groups.world_size,
            )

    @contextmanager
    def watch_attention(self, watch: AttentionWatch) -> Iterator[None]:
        """Pass every call of attention through `watch` inside the context."""
        self.watch = watch
        try:
            yield
        finally:
            self.watch = None

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Return the context for one micro-step, that is, its forward and backward.

        Inside it attention stays within the batch's documents; without packed documents it changes nothing.
        """
        return nullcontext() if batch.documents is None else self.use_documents(batch.documents)

    @contextmanager
    def use_documents(self, documents: Documents | None) -> Iterator[None]:
        """Restrict attention to these documents inside the context; None lifts the restriction."""
        previous = self.documents, self.packing
        self.documents, self.packing = documents, None
        if documents is not None:
            # Copied to the device once a batch, because a layer would have to wait for the copy.
            device = torch.device(self.cell.cluster.device)
            self.packing = packing_of(documents, self.cell.model.head_dim**-0.5, device)
        try:
            yield
        finally:
            self.documents, self.packing = previous

    def _transformers_attention(
        self,
        module: torch.nn.Module,
        query_BNSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Return the output as [B, S, N, D], and no weights, as transformers' attention interface requires.

        Raises:
            RefusedError: If the layer asks for more than causal attention, such as an S x S mask, a window or
                dropout, which strategies do not receive.
        """
        refuse_unsupported_keywords({**keywords, "attention_mask": attention_mask}, query_BNSD.shape[3])
        # Under autocast Q and K leave their norms in float32, while V already has the cell's dtype.
        q, k = query_BNSD.to(value_BKSD.dtype), key_BKSD.to(value_BKSD.dtype)

        def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
            return self.model_attention(module, q_BNSD, k_BKSD, v_BKSD, **keywords)

        if self.watch is not None:
            return self.watch.run(attention, q, k, value_BKSD, keywords.get("position_ids")), None
        return attention(q, k, value_BKSD), None

    def model_attention(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        **keywords: Any,  # noqa: ARG002
    ) -> Tensor:
        """Return the output of attention for one call by a model's layer.

        The default calls `attention`. Override it for a package that needs the module or the keywords.

        Args:
            module: Attention module of the layer.
            q_BNSD: Queries, as in `attention`.
            k_BKSD: Keys, as in `attention`.
            v_BKSD: Values, as in `attention`.
            keywords: Further keywords that transformers passes, such as `position_ids`.

        Returns:
            The output, [batch, shard_len, query heads, head_dim].
        """
        return self.attention(q_BNSD, k_BKSD, v_BKSD).transpose(1, 2)


def refuse_unsupported_keywords(keywords: Mapping[str, Any], head_dim: int) -> None:
    """Raise RefusedError if a keyword asks for more than plain causal attention.

    An unknown keyword is refused unless its value is None, for example `sliding_window`, `softcap`, `s_aux`
    (attention sinks), or a keyword of a later transformers.
    """
    unsupported = {name: value for name, value in keywords.items() if not _is_plain(name, value, head_dim)}
    if unsupported:
        shown = ", ".join(
            f"{name}=a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}={value}"
            for name, value in unsupported.items()
        )
        raise RefusedError(
            f"a layer calls attention with {shown}, but strategies compute plain causal attention and would"
            " ignore it; choose a model whose layers are all full_attention, without attention dropout"
        )


def _is_plain(name: str, value: Any, head_dim: int) -> bool:
    """Return whether a keyword asks for no more than plain causal attention."""
    if name in PLAIN_VALUE_TESTS:
        return PLAIN_VALUE_TESTS[name](value, head_dim)
    return value is None or name in IGNORED_KEYWORDS
