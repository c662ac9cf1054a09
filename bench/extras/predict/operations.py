"""What one rank computes in a step: operations of a few kinds, by their sizes.

Written for the formulas: R the rows (tokens) of a rank's micro-step, h the hidden size, f the intermediate
size, V the vocabulary, e the bytes of a number in the cell's dtype. The list is that of transformers' Llama
and Qwen layers as they run, operator by operator, without compilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.config import DTYPE_BYTES, Cell
from bench.cost.memory import CHUNK_ROWS
from bench.strategies.schedule import Block
from bench.training.engines import ENGINE_FACTS, is_autocast, stream_bytes
from bench.training.parameters import HEAD_NORM_FAMILIES, kv_size, parameters, q_size, trained_tensors

INPUT_CASTS = 5
"""Projections of a layer whose input is float32 under autocast: Q, K, V, the gate and what it gates."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A number of equal operations."""

    kind: str
    """A name of KINDS."""
    rows: int
    columns: int
    inner: int = 1
    """Of a matrix product what is summed over."""
    number_bytes: int = 2
    count: int = 1

    @property
    def flops(self) -> int:
        """Of one."""
        return 2 * self.rows * self.columns * self.inner if self.kind == "product" else 0

    @property
    def moved_bytes(self) -> int:
        """Read and written by one, if nothing stays in a cache."""
        numbers, kind = self.rows * self.columns, KINDS[self.kind]
        if self.kind == "product":
            return self.number_bytes * (numbers + self.rows * self.inner + self.columns * self.inner)
        return numbers * (kind.narrow * self.number_bytes + kind.wide * 4)

    @property
    def launches(self) -> int:
        """Operators that Python starts for one."""
        return KINDS[self.kind].launches


class Kind(NamedTuple):
    """How much work one operation of a kind is that is no product."""

    launches: int
    narrow: int = 0
    """How often each number is read or written in the cell's dtype."""
    wide: int = 0
    """How often each number is read or written in float32."""


KINDS: Mapping[str, Kind] = {
    "product": Kind(1),
    # x.float(), its square, mean, product, cast, weight: transformers' RMSNorm.
    "norm": Kind(7, 4, 6),
    "norm_backward": Kind(12, 6, 10),
    # Two products, a negated half, a concatenation and a sum: transformers' apply_rotary_pos_emb.
    "rotary": Kind(5, 10),
    "rotary_backward": Kind(6, 10),
    "activation": Kind(2, 5),
    "activation_backward": Kind(4, 8),
    "sum": Kind(1, 3),
    "cast": Kind(1, 2),
    # Positions times frequencies, twice, their cosine and sine, and a cast of both.
    "angles": Kind(7, 2, 6),
    # Of Ring Self-Attention: -inf written, the product put in its place, masked, softmax over the row.
    # Backward less delta, times the probabilities, times the scale.
    "scores": Kind(6, 7),
    "scores_backward": Kind(3, 7),
    "embedding": Kind(1, 2),
    "embedding_backward": Kind(2, 1, 2),
    # The cast, log-softmax and the gather of each row's label.
    "token_loss": Kind(4, 1, 3),
    "token_loss_backward": Kind(4, 1, 4),
    # Heads' rows beside a kernel: put in another order, merged into wide ones, added to wide ones.
    "pack": Kind(1, 2),
    "merge": Kind(4, 0, 2),
    "accumulate": Kind(1, 0, 2),
    # Weights, gradient and both moments read, all but the gradient written; wide copies and the norm beside.
    "update": Kind(12, 4, 8),
    # DeepSpeed clips, scales and copies besides: 17.9 ms for 0.6B parameters, some 52 bytes of each at the
    # share of the bandwidth in conf/hardware/h100_80gb.yaml (results/reference/h100).
    "copying_update": Kind(12, 4, 11),
}
"""Every kind but attention's blocks, which kernels compute."""


def micro_step(cell: Cell) -> Iterator[Operation]:
    """All but attention of one micro-step, forward and backward."""
    layers, recomputed = cell.model.num_layers, 2 if cell.checkpointing else 1
    for operation in layer_forward(cell):
        yield _times(operation, layers * recomputed)
    for operation in layer_backward(cell):
        yield _times(operation, layers)
    yield from _ends(cell)


def step_end(cell: Cell) -> Iterator[Operation]:
    """The optimizer's update of a rank's share of the parameters: so many tensors of so many numbers."""
    engine, tensors = ENGINE_FACTS[cell.engine.name], len(trained_tensors(cell.model))
    count = parameters(cell.model) // engine.shards(cell)
    kind = "copying_update" if engine.copies_in_update else "update"
    yield _one(cell, kind, tensors, max(1, count // tensors))


def layer_forward(cell: Cell) -> Iterator[Operation]:
    """One layer's forward pass; under autocast five projections cast their input."""
    rows, model = _rows(cell), cell.model
    yield from _of(cell, _projections(cell))
    yield _stream(cell, "norm", rows, model.hidden_size, 2)
    yield from _head_norms(cell, "norm")
    yield _stream(cell, "rotary", rows * (model.num_heads + model.num_kv_heads), model.head_dim)
    yield _stream(cell, "sum", rows, model.hidden_size, 2)
    if is_autocast(cell):
        yield _stream(cell, "cast", rows, model.hidden_size, INPUT_CASTS)
    yield from _mlp_forward(cell)


def layer_backward(cell: Cell) -> Iterator[Operation]:
    """One layer's backward pass: each product's two, and with a tiled MLP that once more forward.

    Five gradients are added where an input was used more than once: both residual sums, Q with K with V, and
    the gate with what it gates.
    """
    rows, model = _rows(cell), cell.model
    for columns, inner in (*_projections(cell), *_mlp(cell)):
        yield from _product_backward(cell, rows, columns, inner)
    yield _stream(cell, "norm_backward", rows, model.hidden_size, 2)
    yield from _head_norms(cell, "norm_backward")
    yield _stream(cell, "rotary_backward", rows * (model.num_heads + model.num_kv_heads), model.head_dim)
    yield _stream(cell, "sum", rows, model.hidden_size, 5)
    if is_autocast(cell):
        yield _stream(cell, "cast", rows, model.hidden_size, INPUT_CASTS)
    yield _one(cell, "activation_backward", rows, model.intermediate_size)
    if cell.tiled_mlp:
        yield from _mlp_forward(cell)


def _ends(cell: Cell) -> Iterator[Operation]:
    """Embedding, last norm, output head and loss, forward and backward; a chunked loss computes twice."""
    rows, model = _rows(cell), cell.model
    is_chunked = cell.loss == "chunked"
    forwards = 2 if is_chunked else 1
    at_once = min(rows, CHUNK_ROWS) if is_chunked else rows
    chunks = math.ceil(rows / at_once)
    yield _stream(cell, "angles", rows, model.head_dim)
    yield _stream(cell, "embedding", rows, model.hidden_size)
    yield _stream(cell, "embedding_backward", rows, model.hidden_size)
    yield _stream(cell, "norm", rows, model.hidden_size)
    yield _stream(cell, "norm_backward", rows, model.hidden_size)
    yield _times(_product(cell, at_once, model.vocab_size, model.hidden_size), forwards * chunks)
    for each in _product_backward(cell, at_once, model.vocab_size, model.hidden_size):
        yield _times(each, chunks)
    yield _one(cell, "token_loss", at_once, model.vocab_size, forwards * chunks)
    yield _one(cell, "token_loss_backward", at_once, model.vocab_size, chunks)


def _mlp_forward(cell: Cell) -> Iterator[Operation]:
    yield from _of(cell, _mlp(cell))
    yield _one(cell, "activation", _rows(cell), cell.model.intermediate_size)


def _projections(cell: Cell) -> tuple[tuple[int, int], ...]:
    """Columns and inner sizes of Q, K, V and the output."""
    q, kv, h = q_size(cell.model), kv_size(cell.model), cell.model.hidden_size
    return (q, h), (kv, h), (kv, h), (h, q)


def _mlp(cell: Cell) -> tuple[tuple[int, int], ...]:
    h, f = cell.model.hidden_size, cell.model.intermediate_size
    return (f, h), (f, h), (h, f)


def _head_norms(cell: Cell, kind: str) -> Iterator[Operation]:
    """Of each head of Q and of K, in families that have them."""
    if cell.model.family in HEAD_NORM_FAMILIES:
        yield _stream(cell, kind, _rows(cell) * cell.model.num_heads, cell.model.head_dim)
        yield _stream(cell, kind, _rows(cell) * cell.model.num_kv_heads, cell.model.head_dim)


def _of(cell: Cell, products: tuple[tuple[int, int], ...]) -> Iterator[Operation]:
    for columns, inner in products:
        yield _product(cell, _rows(cell), columns, inner)


def _product(cell: Cell, rows: int, columns: int, inner: int) -> Operation:
    return Operation("product", rows, columns, inner, DTYPE_BYTES[cell.dtype])


def _product_backward(cell: Cell, rows: int, columns: int, inner: int) -> Iterator[Operation]:
    """The gradients of a linear layer's input and weight."""
    yield _product(cell, rows, inner, columns)
    yield _product(cell, columns, inner, rows)


def _one(cell: Cell, kind: str, rows: int, columns: int, count: int = 1) -> Operation:
    return Operation(kind, rows, columns, number_bytes=DTYPE_BYTES[cell.dtype], count=count)


def _stream(cell: Cell, kind: str, rows: int, columns: int, count: int = 1) -> Operation:
    """One between layers, where autocast leaves everything in float32."""
    return replace(_one(cell, kind, rows, columns, count), number_bytes=stream_bytes(cell))


def _times(operation: Operation, count: int) -> Operation:
    return replace(operation, count=operation.count * count)


def _rows(cell: Cell) -> int:
    return cell.batch * cell.shard_len


FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Of a flash kernel: Q K^T and P V; backward computes the scores again (arXiv:2307.08691, section 3.1)."""


def unfused_block(block: Block, head_dim: int, number_bytes: int, *, backward: bool) -> tuple[Operation, ...]:
    """A block of `ring_self_attention`, all of whose scores are in memory; masked ones are computed, too."""
    count = block.sequences * block.heads
    queries, keys = block.queries, block.keys

    def product(rows: int, columns: int, inner: int) -> Operation:
        return Operation("product", rows, columns, inner, number_bytes, count)

    scores = Operation("scores_backward" if backward else "scores", queries, keys, 1, number_bytes, count)
    of_keys = (product(keys, head_dim, queries),) * 2 if backward else ()
    return (product(queries, keys, head_dim), scores, product(queries, head_dim, keys), *of_keys)


def block_flops(block: Block, head_dim: int, products: int) -> int:
    """Of one kernel call, by the pairs that the mask leaves."""
    return 2 * products * block.area * head_dim
