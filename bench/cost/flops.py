"""Floating-point operations of one optimizer step, all ranks together, and a rank's share of the causal mask.

Conventions: a multiply-add is two operations; backward is twice forward; embeddings look up and cost
nothing, the output head counts. "Causal" counts the S(S+1)/2 score entries that the mask leaves, "full"
all S^2.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.attention.documents import Documents, keys_seen
from bench.attention.layouts import LAYOUTS
from bench.config import Cell
from bench.strategies import STRATEGIES
from bench.training.parameters import head_parameters, layer_parameters, matrix_parameters, mlp_parameters

FORWARD_AND_BACKWARD = 3
FLASH_BACKWARD_FACTOR = 2.5
"""A flash backward recomputes the scores: five matrix products to the forward's two (arXiv:2307.08691)."""


@dataclass(frozen=True, slots=True)
class CausalPairs:
    """(Query, key) pairs that the mask leaves all sequences of one step."""

    own: int
    computed: int
    """With those of padding."""

    @classmethod
    def of(cls, cell: Cell) -> CausalPairs:
        """Those of sequences that are one document each."""
        own, padded = (length * (length + 1) // 2 for length in (cell.seq_len, cell.padded_len))
        return cls(own * cell.sequences_per_step, padded * cell.sequences_per_step)


def attention_forward_flops(cell: Cell, *, causal: bool, pairs: CausalPairs | None = None) -> int:
    """Q K^T and P V of every layer and sequence of one step, without padding; `pairs` are of documents."""
    own = (pairs or CausalPairs.of(cell)).own
    return _attention_flops(cell, own, cell.seq_len, causal=causal)


def _attention_flops(cell: Cell, pairs: int, seq_len: int, *, causal: bool) -> int:
    """Without the mask, a document of n tokens has n^2 scores, not n (n + 1) / 2."""
    entries = pairs if causal else 2 * pairs - seq_len * cell.sequences_per_step
    return 4 * entries * cell.model.num_layers * cell.model.num_heads * cell.model.head_dim


def attention_backward_flops(cell: Cell, *, causal: bool) -> int:
    """Five matrix products, as a flash backward runs them."""
    return int(FLASH_BACKWARD_FACTOR * attention_forward_flops(cell, causal=causal))


def model_flops(cell: Cell, *, causal: bool, pairs: CausalPairs | None = None) -> int:
    """What the mathematics needs, forward and backward, without any recomputation: MFU's numerator."""
    dense = 2 * matrix_parameters(cell.model) * cell.tokens_per_step
    return FORWARD_AND_BACKWARD * (dense + attention_forward_flops(cell, causal=causal, pairs=pairs))


def hardware_flops(cell: Cell, *, causal: bool, pairs: CausalPairs | None = None) -> int:
    """What is executed: flash backward's scores, and again what is computed twice. HFU's numerator.

    Checkpointing runs the layers forward once more, a tiled MLP each MLP, a chunked loss the output head;
    padding is computed, too.
    """
    computed = (pairs or CausalPairs.of(cell)).computed
    attention = _attention_flops(cell, computed, cell.padded_len, causal=causal)
    tokens = cell.padded_len * cell.sequences_per_step
    layers = 2 * layer_parameters(cell.model) * tokens
    head = 2 * head_parameters(cell.model) * tokens
    recomputed = layers if cell.checkpointing else 0
    facts = STRATEGIES.get(cell.strategy)  # of one that is in no table checkpointing recomputes attention
    attends_again = cell.checkpointing if facts is None else facts.recomputes_attention(cell)
    recomputed += attention if attends_again else 0
    recomputed += head if cell.loss == "chunked" else 0
    recomputed += 2 * mlp_parameters(cell.model) * tokens if cell.tiled_mlp else 0
    return int(FORWARD_AND_BACKWARD * (layers + head) + attention * (1 + FLASH_BACKWARD_FACTOR) + recomputed)


def causal_area(cell: Cell, group_rank: int) -> int:
    """Return the (query, key, head) triples that the causal mask leaves a rank, of one sequence and layer.

    Ranks that share heads hold the same queries once heads are exchanged; those of a ring keep their own
    and see all keys. A query at position p sees p + 1 keys.
    """
    pairs = sum(keys_seen(range(cell.padded_len)[piece]) for piece in _queries(cell, group_rank))
    return pairs * (cell.model.num_heads // cell.ulysses_degree)


def packed_area(cell: Cell, documents: Documents, group_rank: int) -> int:
    """Return the triples (head, query, key) of a batch whose attention stays within documents."""
    return documents.causal_pairs(_queries(cell, group_rank)) * (cell.model.num_heads // cell.ulysses_degree)


def _queries(cell: Cell, group_rank: int) -> tuple[slice, ...]:
    return LAYOUTS[cell.layout].slices(cell.padded_len, cell.ring_degree, cell.ring_rank(group_rank))
