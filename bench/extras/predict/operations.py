"""Operations that one rank computes in a step, by kind and size.

The list follows transformers' Llama and Qwen layers as they run without compilation, operator by operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.config import DTYPE_BYTES, Cell
from bench.cost.flops import last_tile_rows, micro_step_rows
from bench.cost.memory import CHUNK_ROWS
from bench.strategies.schedule import Block
from bench.training.engines import ENGINE_FACTS, is_autocast, recomputes_last_product, stream_bytes
from bench.training.parameters import HEAD_NORM_FAMILIES, kv_size, parameters, q_size, trained_tensors

INPUT_CASTS = 5
"""Projections of a layer whose input autocast converts from float32: Q, K, V, gate and up."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Equal operations: `count` times the same kind with the same size."""

    kind: str
    """Key of OPERATION_KINDS."""
    rows: int
    columns: int
    inner: int = 1
    """Inner dimension of a matrix product; 1 for other kinds."""
    number_bytes: int = 2
    """Bytes of a number in the operation's dtype."""
    count: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of one matrix product; 0 for other kinds, which memory limits."""
        return 2 * self.rows * self.columns * self.inner if self.kind == "product" else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that one operation reads and writes if nothing stays in a cache."""
        numbers, kind = self.rows * self.columns, OPERATION_KINDS[self.kind]
        if self.kind == "product":
            return self.number_bytes * (numbers + self.rows * self.inner + self.columns * self.inner)
        return numbers * (kind.dtype_accesses * self.number_bytes + kind.float32_accesses * 4)

    @property
    def launches(self) -> int:
        """Operators that Python launches for one operation."""
        return OPERATION_KINDS[self.kind].launches


class OperationKind(NamedTuple):
    """Launches and memory traffic of one operation of a kind."""

    launches: int
    """Operators that Python launches."""
    dtype_accesses: int = 0
    """Number of times that a number is read or written in the operation's dtype; 0 for products."""
    float32_accesses: int = 0
    """Number of times that a number is read or written in float32; 0 for products."""


OPERATION_KINDS: Mapping[str, OperationKind] = {
    "product": OperationKind(1),
    # transformers' RMSNorm: x.float(), square, mean, product, cast, weight.
    "norm": OperationKind(7, 4, 6),
    "norm_backward": OperationKind(12, 6, 10),
    # transformers' apply_rotary_pos_emb: two products, a negated half, a concatenation and a sum.
    "rotary": OperationKind(5, 10),
    "rotary_backward": OperationKind(6, 10),
    "activation": OperationKind(2, 5),
    "activation_backward": OperationKind(4, 8),
    "sum": OperationKind(1, 3),
    "cast": OperationKind(1, 2),
    # Positions times frequencies, a second time, cosine and sine of the result, and a cast of both.
    "angles": OperationKind(7, 2, 6),
    # Ring Self-Attention: write -inf, copy the product into it, mask, softmax over the row. In backward:
    # subtract delta, multiply by the probabilities, multiply by the scale.
    "scores": OperationKind(6, 7),
    "scores_backward": OperationKind(3, 7),
    "embedding": OperationKind(1, 2),
    "embedding_backward": OperationKind(2, 1, 2),
    # A cast, log-softmax, and the gather of every row's label.
    "token_loss": OperationKind(4, 1, 3),
    "token_loss_backward": OperationKind(4, 1, 4),
    # Rows of heads before and after kernels: reordered, merged into float32 rows, added to float32 rows.
    "pack": OperationKind(1, 2),
    "merge": OperationKind(4, 0, 2),
    "accumulate": OperationKind(1, 0, 2),
    # AdamW reads weights, gradients and both moments and writes all but the gradients; float32 copies and the
    # gradient norm add to this.
    "update": OperationKind(12, 4, 8),
    # DeepSpeed also clips, scales and copies: 17.9 ms for 0.6B parameters, about 52 bytes per parameter at
    # the share of bandwidth in conf/hardware/h100_80gb.yaml (results/reference/h100).
    "copying_update": OperationKind(12, 4, 11),
}
"""Launches and memory traffic of every kind of operation; attention kernels are no kind."""


def micro_step_operations(cell: Cell) -> Iterator[Operation]:
    """Yield the operations of one micro-step, forward and backward, outside attention."""
    for operation in (*_layer_forward(cell), *_layer_backward(cell)):
        yield _repeat(operation, cell.model.num_layers)
    yield from _embedding_and_loss(cell)


def update_operations(cell: Cell) -> Iterator[Operation]:
    """Yield the optimizer's update of this rank's parameters, as equal operations on all tensors."""
    engine, tensors = ENGINE_FACTS[cell.engine.name], len(trained_tensors(cell.model))
    count = parameters(cell.model) // engine.shards(cell)
    kind = "copying_update" if engine.copies_in_update else "update"
    yield _elementwise(cell, kind, tensors, max(1, count // tensors))


def _layer_forward(cell: Cell) -> Iterator[Operation]:
    """Yield the operations of one layer's forward outside attention, including autocast's input casts."""
    yield from _forward_before_mlp(cell)
    yield from _mlp_forward(cell, micro_step_rows(cell))
    yield _in_stream_dtype(cell, "sum", micro_step_rows(cell), cell.model.hidden_size)


def _forward_before_mlp(cell: Cell) -> Iterator[Operation]:
    """Yield the operations of one layer's forward up to the MLP, and the input casts of gate and up."""
    rows, model = micro_step_rows(cell), cell.model
    yield from _products(cell, rows, _projection_sizes(cell))
    yield _in_stream_dtype(cell, "norm", rows, model.hidden_size, 2)
    yield from _head_norms(cell, "norm")
    yield _in_stream_dtype(cell, "rotary", rows * (model.num_heads + model.num_kv_heads), model.head_dim)
    yield _in_stream_dtype(cell, "sum", rows, model.hidden_size)
    if is_autocast(cell):
        yield _in_stream_dtype(cell, "cast", rows, model.hidden_size, INPUT_CASTS)


def _layer_backward(cell: Cell) -> Iterator[Operation]:
    """Yield the operations of one layer's backward outside attention: two products for each in forward.

    With checkpointing or a tiled MLP, backward also runs forward again (`bench.cost.flops.hardware_flops`).
    The gradients of an input that several operators use are summed: two sums for the residuals, two for the
    input of Q, K and V, one for the input of gate and up.
    """
    rows, model = micro_step_rows(cell), cell.model
    for columns, inner in (*_projection_sizes(cell), *_mlp_sizes(cell)):
        yield from _product_backward(cell, rows, columns, inner)
    yield _in_stream_dtype(cell, "norm_backward", rows, model.hidden_size, 2)
    yield from _head_norms(cell, "norm_backward")
    yield _in_stream_dtype(
        cell, "rotary_backward", rows * (model.num_heads + model.num_kv_heads), model.head_dim
    )
    yield _in_stream_dtype(cell, "sum", rows, model.hidden_size, 5)
    if is_autocast(cell):
        yield _in_stream_dtype(cell, "cast", rows, model.hidden_size, INPUT_CASTS)
    yield _elementwise(cell, "activation_backward", rows, model.intermediate_size)
    if cell.checkpointing:
        yield from _forward_before_mlp(cell)
    if cell.checkpointing and cell.tiled_mlp and rows > last_tile_rows(cell):
        yield from _mlp_forward(cell, rows - last_tile_rows(cell))
    if cell.checkpointing or cell.tiled_mlp:
        yield from _mlp_forward(cell, rows, skips_last=not recomputes_last_product(cell))


def _embedding_and_loss(cell: Cell) -> Iterator[Operation]:
    """Yield the operations of embedding, last norm, output head and loss, forward and backward.

    A chunked loss computes output head and loss in chunks of rows, and their forward twice.
    """
    rows, model = micro_step_rows(cell), cell.model
    is_chunked = cell.loss == "chunked"
    forwards = 2 if is_chunked else 1
    chunk_rows = min(rows, CHUNK_ROWS) if is_chunked else rows
    chunks = math.ceil(rows / chunk_rows)
    yield _in_stream_dtype(cell, "angles", rows, model.head_dim)
    yield _in_stream_dtype(cell, "embedding", rows, model.hidden_size)
    yield _in_stream_dtype(cell, "embedding_backward", rows, model.hidden_size)
    yield _in_stream_dtype(cell, "norm", rows, model.hidden_size)
    yield _in_stream_dtype(cell, "norm_backward", rows, model.hidden_size)
    yield _repeat(_product(cell, chunk_rows, model.vocab_size, model.hidden_size), forwards * chunks)
    for product in _product_backward(cell, chunk_rows, model.vocab_size, model.hidden_size):
        yield _repeat(product, chunks)
    yield _elementwise(cell, "token_loss", chunk_rows, model.vocab_size, forwards * chunks)
    yield _elementwise(cell, "token_loss_backward", chunk_rows, model.vocab_size, chunks)


def _mlp_forward(cell: Cell, rows: int, *, skips_last: bool = False) -> Iterator[Operation]:
    yield from _products(cell, rows, _mlp_sizes(cell)[: -1 if skips_last else None])
    yield _elementwise(cell, "activation", rows, cell.model.intermediate_size)


def _projection_sizes(cell: Cell) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output size, input size) of the Q, K, V and output projections."""
    q, kv, hidden = q_size(cell.model), kv_size(cell.model), cell.model.hidden_size
    return (q, hidden), (kv, hidden), (kv, hidden), (hidden, q)


def _mlp_sizes(cell: Cell) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output size, input size) of the gate, up and down projections."""
    hidden, mlp = cell.model.hidden_size, cell.model.intermediate_size
    return (mlp, hidden), (mlp, hidden), (hidden, mlp)


def _head_norms(cell: Cell, kind: str) -> Iterator[Operation]:
    """Yield the norms of the heads of Q and K, in model families that have these norms."""
    rows, model = micro_step_rows(cell), cell.model
    if model.family in HEAD_NORM_FAMILIES:
        yield _in_stream_dtype(cell, kind, rows * model.num_heads, model.head_dim)
        yield _in_stream_dtype(cell, kind, rows * model.num_kv_heads, model.head_dim)


def _products(cell: Cell, rows: int, sizes: tuple[tuple[int, int], ...]) -> Iterator[Operation]:
    for columns, inner in sizes:
        yield _product(cell, rows, columns, inner)


def _product(cell: Cell, rows: int, columns: int, inner: int) -> Operation:
    return Operation("product", rows, columns, inner, DTYPE_BYTES[cell.dtype])


def _product_backward(cell: Cell, rows: int, columns: int, inner: int) -> Iterator[Operation]:
    """Yield the products that compute the gradients of a linear layer's input and weight."""
    yield _product(cell, rows, inner, columns)
    yield _product(cell, columns, inner, rows)


def _elementwise(cell: Cell, kind: str, rows: int, columns: int, count: int = 1) -> Operation:
    return Operation(kind, rows, columns, number_bytes=DTYPE_BYTES[cell.dtype], count=count)


def _in_stream_dtype(cell: Cell, kind: str, rows: int, columns: int, count: int = 1) -> Operation:
    """Return an elementwise operation in the dtype of the residual stream, float32 under autocast."""
    return replace(_elementwise(cell, kind, rows, columns, count), number_bytes=stream_bytes(cell))


def _repeat(operation: Operation, count: int) -> Operation:
    return replace(operation, count=operation.count * count)


FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products of a flash kernel: Q K^T and P V in forward; backward also computes the scores again
(arXiv:2307.08691, section 3.1)."""


def unfused_block(block: Block, head_dim: int, number_bytes: int, *, backward: bool) -> tuple[Operation, ...]:
    """Return the operations of one block of `ring_self_attention`, which calls no attention kernel.

    All scores of the block are written to memory, and masked scores are computed too.
    """
    count = block.sequences * block.heads
    queries, keys = block.queries, block.keys

    def product(rows: int, columns: int, inner: int) -> Operation:
        return Operation("product", rows, columns, inner, number_bytes, count)

    scores = Operation("scores_backward" if backward else "scores", queries, keys, 1, number_bytes, count)
    kv_gradients = (product(keys, head_dim, queries),) * 2 if backward else ()
    return (product(queries, keys, head_dim), scores, product(queries, head_dim, keys), *kv_gradients)


def block_flops(block: Block, head_dim: int, products: int) -> int:
    """Return the FLOPs of a kernel call with `products` products, on the pairs that the mask leaves."""
    return 2 * products * block.area * head_dim
