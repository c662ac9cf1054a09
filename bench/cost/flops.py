"""Floating-point operations (FLOPs) of one optimizer step on all ranks, and the causal area of a rank.

Conventions: a multiply-add is two FLOPs; backward has twice the FLOPs of forward; embeddings are lookups
without FLOPs, the output head is a matrix product. "Causal" counts the S(S+1)/2 scores that the mask leaves,
"full" all S^2.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.attention.documents import Documents, visible_keys
from bench.attention.layouts import LAYOUTS
from bench.config import Cell
from bench.strategies import STRATEGIES
from bench.training.engines import recomputes_last_product
from bench.training.parameters import head_parameters, layer_parameters, matrix_parameters, mlp_parameters

FORWARD_AND_BACKWARD = 3
"""Ratio of the FLOPs of forward and backward to the FLOPs of forward."""
FLASH_BACKWARD_FACTOR = 2.5
"""Ratio of the FLOPs of a flash backward to those of its forward. Backward recomputes the scores, so that it
has five matrix products, and forward has two (arXiv:2307.08691)."""


@dataclass(frozen=True, slots=True)
class CausalPairs:
    """Numbers of (query, key) pairs that the causal mask leaves to all sequences of one step."""

    unpadded: int
    computed: int
    """Pairs including padding."""

    @classmethod
    def for_single_documents(cls, cell: Cell) -> CausalPairs:
        """Return the pairs if every sequence is a single document."""
        unpadded, padded = (length * (length + 1) // 2 for length in (cell.seq_len, cell.padded_len))
        return cls(unpadded * cell.sequences_per_step, padded * cell.sequences_per_step)


def attention_forward_flops(cell: Cell, *, causal: bool, pairs: CausalPairs | None = None) -> int:
    """Return the FLOPs of Q K^T and P V of all layers and sequences of one step, without padding.

    Args:
        cell: Cell that runs.
        causal: Whether to count only the scores that the mask leaves.
        pairs: Pairs of packed documents; None if every sequence is a single document.
    """
    unpadded = (pairs or CausalPairs.for_single_documents(cell)).unpadded
    return _attention_flops(cell, unpadded, cell.seq_len, causal=causal)


def _attention_flops(cell: Cell, pairs: int, seq_len: int, *, causal: bool) -> int:
    # A document of n tokens has n (n + 1) / 2 pairs with the mask and n^2 = 2 n (n + 1) / 2 - n without it.
    scores = pairs if causal else 2 * pairs - seq_len * cell.sequences_per_step
    return 4 * scores * cell.model.num_layers * cell.model.num_heads * cell.model.head_dim


def attention_backward_flops(cell: Cell, *, causal: bool) -> int:
    """Return the FLOPs of attention's backward in one step: the five matrix products of a flash backward."""
    return int(FLASH_BACKWARD_FACTOR * attention_forward_flops(cell, causal=causal))


def model_flops(cell: Cell, *, causal: bool, pairs: CausalPairs | None = None) -> int:
    """Return the FLOPs of forward and backward of one step without any recomputation: the numerator of MFU.

    `causal` and `pairs` are those of `attention_forward_flops`.
    """
    dense = 2 * matrix_parameters(cell.model) * cell.tokens_per_step
    return FORWARD_AND_BACKWARD * (dense + attention_forward_flops(cell, causal=causal, pairs=pairs))


def hardware_flops(cell: Cell, *, causal: bool, pairs: CausalPairs | None = None) -> int:
    """Return the FLOPs that all ranks execute in one step: the numerator of HFU.

    They include padding and all recomputation: flash backward recomputes scores, checkpointing the layers, a
    tiled MLP the MLPs, and a chunked loss the output head. A checkpoint recomputes up to its last saved
    tensor: not the down projection (see `recomputes_last_product`), and of a tiled MLP not the last tile,
    which is a checkpoint of its own. `causal` and `pairs` are those of `attention_forward_flops`.
    """
    computed = (pairs or CausalPairs.for_single_documents(cell)).computed
    attention = _attention_flops(cell, computed, cell.padded_len, causal=causal)
    tokens = cell.padded_len * cell.sequences_per_step
    layers = 2 * layer_parameters(cell.model) * tokens
    head = 2 * head_parameters(cell.model) * tokens
    mlps = 2 * mlp_parameters(cell.model) * tokens
    skipped_products = 0 if recomputes_last_product(cell) else mlps // 3
    skipped = mlps // micro_step_rows(cell) * last_tile_rows(cell) if cell.tiled_mlp else skipped_products
    recomputed = layers - skipped if cell.checkpointing else 0
    # A strategy outside the table is assumed to recompute attention with checkpointing.
    facts = STRATEGIES.get(cell.strategy)
    recomputes_attention = cell.checkpointing if facts is None else facts.recomputes_attention(cell)
    recomputed += attention if recomputes_attention else 0
    recomputed += head if cell.loss == "chunked" else 0
    recomputed += mlps - skipped_products if cell.tiled_mlp else 0
    return int(FORWARD_AND_BACKWARD * (layers + head) + attention * (1 + FLASH_BACKWARD_FACTOR) + recomputed)


def micro_step_rows(cell: Cell) -> int:
    """Return the number of tokens that a rank computes in one micro-step."""
    return cell.batch * cell.shard_len


def last_tile_rows(cell: Cell) -> int:
    """Return the number of tokens in the last tile of a tiled MLP."""
    return (micro_step_rows(cell) - 1) % cell.model.hidden_size + 1


def causal_area(cell: Cell, group_rank: int) -> int:
    """Return the number of (query, key, head) triples that the causal mask leaves to a rank, for one sequence
    and layer.

    Ranks that split the heads compute with the same queries after the all-to-all. Ranks of a ring compute
    with their own queries and all keys. A query at position p sees p + 1 keys.

    Args:
        cell: Cell that runs.
        group_rank: Position of the rank in its sequence group.
    """
    pairs = sum(visible_keys(range(cell.padded_len)[piece]) for piece in _queries(cell, group_rank))
    return pairs * (cell.model.num_heads // cell.ulysses_degree)


def packed_area(cell: Cell, documents: Documents, group_rank: int) -> int:
    """Return the causal area of a rank for a batch whose attention stays within documents."""
    return documents.causal_pairs(_queries(cell, group_rank)) * (cell.model.num_heads // cell.ulysses_degree)


def _queries(cell: Cell, group_rank: int) -> tuple[slice, ...]:
    """Return the pieces of a sequence that hold the queries with which a rank computes."""
    return LAYOUTS[cell.layout].slices(cell.padded_len, cell.ring_degree, cell.ring_rank(group_rank))
