"""A strategy's four faces, and what it tells a trainer."""

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
from bench.attention.packed import attend_packed, packing_of, sent
from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.ranks.groups import RankGroups
from bench.ranks.log import RefusedError
from bench.strategies.facts import StrategyFacts
from bench.strategies.package_errors import parts_of_package, usable_kernel

CheckpointContexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
IGNORED_LABEL = -100
# Without "flash" or "sdpa" in it: transformers treats names that hold them in a way of its own.
ATTENTION_NAME = "bench_attention"
WITHOUT_EFFECT = frozenset(
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
"""Keywords that pass through the interface and change no output of causal attention over whole shards."""

HONOURED: Mapping[str, Callable[[Any, int], bool]] = {
    "dropout": lambda value, _: not value,
    "scaling": lambda value, head_dim: value is None or math.isclose(value, head_dim**-0.5, rel_tol=1e-6),
    "is_causal": lambda value, _: value is not False,
}
"""Keywords whose value decides: given it and the head dimension, whether plain causal attention is meant."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole sequences or their shards, [B, S]."""

    samples: Tensor
    """[B], the sequences' numbers, in host memory."""
    input_ids: Tensor
    labels: Tensor
    """Shifted before sharding: token i's label is token i+1, or IGNORED_LABEL."""
    position_ids: Tensor
    documents: Documents | None = None
    """Where those of the whole sequences end, also in a shard; None where each sequence is one."""

    def to(self, device: torch.device) -> Batch:
        """This batch on the device, copied without waiting for it; `samples` stay in host memory."""
        rows = (self.input_ids, self.labels, self.position_ids)
        ids, labels, positions = (sent(each, device) for each in rows)
        return Batch(self.samples, ids, labels, positions, self.documents)


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a trainer has to know of an installed strategy."""

    attention_name: str
    """The name under which transformers finds the attention."""
    shards_batch: bool
    """Whether `shard` has to be applied to whole batches before the model sees them."""
    gradient_divisor: int
    """Over how many ranks the engine averages gradients: a rank's loss is multiplied by it."""


@contextmanager
def attention_replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let transformers find this function by the name of an attention for as long as the context lasts."""
    was_local, before = name in ALL_ATTENTION_FUNCTIONS._local_mapping, ALL_ATTENTION_FUNCTIONS.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        if was_local:
            ALL_ATTENTION_FUNCTIONS[name] = before
        else:
            del ALL_ATTENTION_FUNCTIONS[name]


class Strategy(ABC):
    """One strategy on one rank. `attention` takes and returns [B, N, S, D] shards in the cell's layout."""

    checkpoint_contexts: CheckpointContexts | None = None
    """`context_fn` of `torch.utils.checkpoint`: what a checkpointed layer runs under, first and again."""

    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        self.cell = cell
        self.facts = facts
        self.groups = groups
        self.kernel = usable_kernel(cell.kernel)
        self.watch: AttentionWatch | None = None
        self.documents: Documents | None = None
        self.packing: Packing | None = None
        """The documents in the form that kernels of whole sequences take."""
        with parts_of_package(facts):
            self.load_package()

    def load_package(self) -> None:  # noqa: B027  ours has none
        """Import the package and look up its parts; what that raises makes the cell `unsupported`."""

    @property
    def package_name(self) -> str:
        """The Python package that holds the strategy's modules."""
        return type(self).__module__.rpartition(".")[0]

    @abstractmethod
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        """Attention over the sequence group's shards, [B, N, S, D], differentiable; full where not causal."""

    def attend_whole(self, q_BMTD: Tensor, k_BLTD: Tensor, v_BLTD: Tensor, *, causal: bool) -> Tensor:
        """Attention of some heads over whole sequences, within their documents where they are packed."""
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
        """LSE of this rank's queries over all keys, [B, N, S], where the strategy's code exposes it."""
        return None

    def slices(self, seq_len: int) -> tuple[slice, ...]:
        """The pieces of a whole sequence that this rank holds."""
        return self.facts.slices(self.cell, seq_len, self.groups.sequence_rank)

    def shard(self, batch: Batch) -> Batch:
        """This rank's shard of whole sequences."""
        pieces = self.slices(batch.input_ids.shape[1])
        ids, labels, positions = (
            torch.cat([whole[:, piece] for piece in pieces], dim=1)
            for whole in (batch.input_ids, batch.labels, batch.position_ids)
        )
        return Batch(batch.samples, ids, labels, positions, batch.documents)

    def unshard(self, shards: list[Tensor]) -> Tensor:
        """Whole sequences [B, T, ...] in token order from the shards [B, S, ...] of all group ranks."""
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
        """Register the attention with transformers for as long as the context lasts."""
        with attention_replaced(ATTENTION_NAME, self._transformers_attention):
            yield Wiring(
                attention_name=ATTENTION_NAME,
                shards_batch=self.cell.sp_degree > 1,
                gradient_divisor=self.groups.world_size,
            )

    @contextmanager
    def watched(self, watch: AttentionWatch) -> Iterator[None]:
        """Let a watch see every call of attention for as long as the context lasts."""
        self.watch = watch
        try:
            yield
        finally:
            self.watch = None

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """A context around forward and backward of one micro-step: attention stays within its documents."""
        return nullcontext() if batch.documents is None else self.packed(batch.documents)

    @contextmanager
    def packed(self, documents: Documents | None) -> Iterator[None]:
        """Let attention stay within these documents for as long as the context lasts."""
        before = self.documents, self.packing
        self.documents, self.packing = documents, None
        if documents is not None:
            # Now, once a batch: a layer would have to wait until they are on its device.
            device = torch.device(self.cell.cluster.device)
            self.packing = packing_of(documents, self.cell.model.head_dim**-0.5, device)
        try:
            yield
        finally:
            self.documents, self.packing = before

    def _transformers_attention(
        self,
        module: torch.nn.Module,
        query_BNSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Transformers' attention interface: returns the output as [B, S, N, D], and no weights.

        Raises RefusedError where the layer asks for more than causal attention: no strategy ever sees an
        S x S mask, a window or dropout.
        """
        refuse_unheard({**keywords, "attention_mask": attention_mask}, query_BNSD.shape[3])
        # Under autocast the normed Q and K arrive in float32 while V is already in the cell's dtype.
        q, k = query_BNSD.to(value_BKSD.dtype), key_BKSD.to(value_BKSD.dtype)

        def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
            return self.model_attention(module, q_BNSD, k_BKSD, v_BKSD, **keywords)

        if self.watch is not None:
            return self.watch.run(attention, q, k, value_BKSD, self.documents), None
        return attention(q, k, value_BKSD), None

    def model_attention(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        **keywords: Any,  # noqa: ARG002
    ) -> Tensor:
        """Attention inside the model, [B, S, N, D]: a package that needs the module overrides this."""
        return self.attention(q_BNSD, k_BKSD, v_BKSD).transpose(1, 2)


def refuse_unheard(keywords: Mapping[str, Any], head_dim: int) -> None:
    """Raise RefusedError for a call that asks for more than causal attention: it would be ignored.

    A keyword that is not known is refused by its name unless it is None: `sliding_window`, `softcap` and
    `s_aux` (attention sinks) are such, and whatever a later transformers passes.
    """
    unheard = {name: value for name, value in keywords.items() if not _is_plain(name, value, head_dim)}
    if unheard:
        shown = ", ".join(
            f"{name}=a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}={value}"
            for name, value in unheard.items()
        )
        raise RefusedError(
            f"a layer calls attention with {shown}: strategies compute plain causal attention and"
            " would ignore it; choose a model whose layers are all full_attention, and no dropout of scores"
        )


def _is_plain(name: str, value: Any, head_dim: int) -> bool:
    """Return whether a keyword asks for no more than plain causal attention."""
    if name in HONOURED:
        return HONOURED[name](value, head_dim)
    return value is None or name in WITHOUT_EFFECT
