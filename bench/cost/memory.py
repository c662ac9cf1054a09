"""Estimate of the peak memory of a rank in training, as a sum of terms.

The peak can be at five moments: building the model, the loss, the backward of a layer's MLP or norm, the
backward of a layer's attention, and the optimizer's update.

Symbols of the formulas: h hidden size, f intermediate size, q and k total size of all query heads and of all
KV heads, V vocabulary, e bytes of a number in the cell's dtype, R tokens that a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.common.cpu_arithmetic import estimated_bf16_instructions
from bench.common.labels import GIB
from bench.config import DTYPE_BYTES, Cell
from bench.cost.band import Band
from bench.strategies import STRATEGIES
from bench.strategies.facts import activation_bytes, kernel_repeats_kv, kv_heads_with_repeats
from bench.strategies.schedule import Stage, Stages
from bench.training.engines import ENGINE_FACTS, is_autocast, stream_bytes
from bench.training.engines.facts import EngineMemory
from bench.training.parameters import FLOAT32_BYTES, HEAD_NORM_FAMILIES, head_parameters, kv_size, q_size
from bench.training.trainer_facts import NATIVE

TOKEN_BYTES = 8
"""Size of a token id."""
WIDE_KERNELS = ("torch_flash", "flash_blocks")
"""Kernels that compute in float32 on a CPU without 16-bit instructions."""
CHUNK_ROWS = 1024
"""Rows of logits in a chunk of the chunked loss. It equals CHUNK_TOKENS of bench/training/loss.py, which
imports torch."""
CONTEXT_BYTES = GIB
"""Expected memory of CUDA's context, its libraries and NCCL. Context and libraries take 0.5 to 0.7 GiB by
public out-of-memory messages (memory in use beyond torch's own). The rest is for NCCL's buffers, which we do
not measure."""
FORMULA_SHARE = 0.03
"""Relative error of the formula for tensors. Nine in ten measured peaks of CPU ranks in results/reference/
differ by less (docs/published_memory.md)."""
CONTEXT_GIB = (0.5, 2.5)
"""Bounds of the memory of CUDA's context, its libraries and NCCL in GiB. Context and libraries take 0.5 to
0.7 GiB by public out-of-memory messages. The upper bound leaves about 2 GiB for the buffers of NCCL's process
groups, which we do not measure."""
FRAGMENTATION_SHARE = 0.15
"""Upper bound of the memory that the caching allocator loses to fragmentation, as a share of the tensors'
bytes. It is the average over eight models with recomputation, sharding and offloading (GMLake,
arXiv:2401.08156). The lower bound is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Predicted peak memory of a rank in bytes, term by term."""

    states: int
    """This rank's shard of parameters, gradients and optimizer state."""
    gathered: int
    """Gathered weights of other shards, or low-precision copies of this rank's weights."""
    activations: int
    """Tensors that all layers save for backward. With checkpointing these are the layers' inputs, unless they
    are offloaded."""
    loss: int
    """Tensors at the loss: logits with their gradient, the last norm, the gradient of the output head."""
    layer: int
    """Tensors in the backward of a layer: gradients of activations and weights, and with checkpointing the
    recomputed activations."""
    attention: int
    """Tensors in the backward of a layer's attention, which follows that of its MLP."""
    communication: int
    """Tensors in addition to `attention`: buffers of attention communication, and float32 partial
    gradients."""
    update: int
    """Gradients at the end of a step, as the engine reduces them and as the optimizer takes them."""
    loading: int
    """Tensors while the model is built, before any tensor of the other terms exists: the shard, and one whole
    part in float32."""
    context: int
    """Memory of the process that is not in tensors."""

    @property
    def total_bytes(self) -> int:
        """Peak bytes of the rank."""
        return self.allocated_bytes + self.context

    @property
    def allocated_bytes(self) -> int:
        """Peak bytes of tensors."""
        return max(self.loading, self.states + self.step_bytes)

    @property
    def step_bytes(self) -> int:
        """Peak bytes of the tensors that a step allocates and frees."""
        moment = max(self.loss, self.layer, self.attention + self.communication)
        return max(self.gathered + self.activations + moment, self.update)


def memory_need(cell: Cell) -> MemoryNeed | None:
    """Return the estimate for a cell that trains; None for other workloads."""
    if not cell.workload.trains:
        return None
    engine = ENGINE_FACTS[cell.engine.name].memory(cell)
    rows, layers = cell.batch * cell.shard_len, cell.model.num_layers
    facts = STRATEGIES[cell.strategy]
    saved = rows * layer_bytes_per_token(cell)
    checkpointed_attention = facts.checkpointed_bytes(cell)
    checkpointed_layer = rows * stream_bytes(cell) * cell.model.hidden_size + checkpointed_attention
    saved_per_layer = checkpointed_layer if cell.checkpointing else saved
    last_norm = rows * _last_norm_bytes_per_token(cell)
    # Offloading leaves the input of one layer on a GPU. A CPU rank has only host memory, so it frees nothing.
    is_offloaded = cell.offload.activations and cell.cluster.device == "cuda"
    activations = saved_per_layer if is_offloaded else layers * saved_per_layer
    # The gradient that arrives at a norm, and three tensors in float32.
    norm_backward = rows * (DTYPE_BYTES[cell.dtype] + 3 * FLOAT32_BYTES) * cell.model.hidden_size
    recomputed = saved - checkpointed_attention if cell.checkpointing else 0
    # At the last layer's backward the gradients of all other layers exist, and their activations are freed.
    arrived = max(0, saved_per_layer + engine.arriving - activations)
    # Negative if attention's backward frees more than it allocates. Buffers of communication use that room.
    attention = arrived + recomputed + _attention_backward_bytes(cell, rows) + engine.kept_head_gradient
    attention += wide_copies_bytes(cell)
    return MemoryNeed(
        states=engine.states,
        gathered=engine.gathered,
        activations=activations,
        loss=last_norm - rows * DTYPE_BYTES[cell.dtype] * cell.model.hidden_size + _loss_bytes(cell, rows),
        layer=max(
            last_norm + norm_backward + engine.layer_gradients,
            recomputed + _layer_backward_bytes(cell, rows, engine) + arrived,
        ),
        attention=max(0, attention),
        communication=max(0, communication_bytes(cell) + min(0, attention)),
        update=engine.update,
        loading=engine.loading,
        context=CONTEXT_BYTES if cell.cluster.device == "cuda" else 0,
    )


def allocated_band(cell: Cell, need: MemoryNeed) -> Band:
    """Return the peak bytes of tensors, with bounds.

    The lower bound assumes that all unknowns are favourable at once, the upper bound that all are
    unfavourable.
    """
    expected = need.allocated_bytes
    engine = ENGINE_FACTS[cell.engine.name].memory(cell)
    spread = round(FORMULA_SHARE * expected)
    return Band(expected - spread - engine.spare, expected, expected + spread + engine.beyond)


def needed_band(cell: Cell, need: MemoryNeed) -> Band:
    """Return the peak bytes of a rank with bounds: tensors, CUDA's context and lost allocator memory."""
    allocated = allocated_band(cell, need)
    if cell.cluster.device != "cuda":
        return allocated
    context_low, context_high = (round(gib * GIB) for gib in CONTEXT_GIB)
    high = round(allocated.high * (1 + FRAGMENTATION_SHARE)) + context_high
    return Band(allocated.low + context_low, need.total_bytes, high)


def layer_bytes_per_token(cell: Cell) -> int:
    """Return the bytes that one layer saves for backward, per token of a rank.

    The result is exact: a test compares it with torch's saved-tensor hooks on a CPU. The terms are (4 + e)h +
    4 for a norm of the layer, and the same with the head size in place of h for the norm of a head; 2eh for
    the inputs of the projections; 2e(q + k) for Q, K, V and the output, with the LSE and further tensors of
    the strategy; 4ef for an MLP that is not tiled. Under autocast a norm saves 8h, and every projection casts
    its input again.
    """
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    q, kv = q_size(model), kv_size(model)
    norms = 2 * (_norm_bytes(cell, model.hidden_size) + FLOAT32_BYTES)
    head_norms = 0
    if model.family in HEAD_NORM_FAMILIES:
        heads = model.num_heads + model.num_kv_heads
        head_norms = (FLOAT32_BYTES + e) * (q + kv) + FLOAT32_BYTES * heads
    inputs = (5 if is_autocast(cell) else 2) * e * model.hidden_size
    lse = max(FLOAT32_BYTES, e) * model.num_heads
    attention = 2 * e * (q + kv_heads_with_repeats(cell) * model.head_dim) + lse
    attention += STRATEGIES[cell.strategy].saved_bytes_per_token(cell)
    mlp = 0 if cell.tiled_mlp else _mlp_bytes_per_token(cell)
    return norms + head_norms + inputs + attention + mlp


def _mlp_bytes_per_token(cell: Cell) -> int:
    """Return the bytes that an MLP saves: both projections, the activation and their product."""
    return 4 * DTYPE_BYTES[cell.dtype] * cell.model.intermediate_size


def _last_norm_bytes_per_token(cell: Cell) -> int:
    """Return the bytes of the last norm, the head's input with its gradient, and the shared tensors."""
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    norm = _norm_bytes(cell, model.hidden_size) + FLOAT32_BYTES
    return norm + 2 * e * model.hidden_size + _shared_bytes_per_token(cell)


def _shared_bytes_per_token(cell: Cell) -> int:
    """Return the bytes of tensors that exist once for all layers: token ids and rotary angles."""
    return 2 * DTYPE_BYTES[cell.dtype] * cell.model.head_dim + 2 * TOKEN_BYTES


def _loss_bytes(cell: Cell, rows: int) -> int:
    """Return the peak bytes of logits and loss, for one chunk or for all rows.

    There are two moments. First there are three float32 tensors [rows, V]: log-softmax, its gradient and the
    gradient of the logits. Then there are the float32 gradient of the logits, its copy in the cell's dtype,
    and the gradient of the output head. With several chunks, the head's gradient of earlier chunks exists at
    both moments. A trainer other than native also keeps the logits of sharded sequences, because it computes
    the loss outside the model.
    """
    e, loss_dtype_bytes = DTYPE_BYTES[cell.dtype], max(FLOAT32_BYTES, DTYPE_BYTES[cell.dtype])
    chunk_rows = min(rows, CHUNK_ROWS) if cell.loss == "chunked" else rows
    head_gradient, logits = e * head_parameters(cell.model), cell.model.vocab_size * chunk_rows
    always = head_gradient if chunk_rows < rows else 0
    if cell.trainer != NATIVE and cell.sp_degree > 1:
        always += e * logits
    first_moment = 3 * loss_dtype_bytes * logits
    second_moment = (loss_dtype_bytes + e) * logits + head_gradient
    return always + max(first_moment, second_moment)


def _layer_backward_bytes(cell: Cell, rows: int, engine: EngineMemory) -> int:
    """Return the bytes that a layer's backward adds to the tensors that the layer saved.

    The peak is at the backward of the MLP, 2ef + eh per row. If the MLP is tiled, it is at the backward of a
    tile, or of the norm before the MLP. A strategy that has all scores in memory may have its peak there.
    """
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    moments = [rows * e * (2 * model.intermediate_size + model.hidden_size) + engine.layer_gradients]
    if cell.tiled_mlp:
        # The gradient that arrives at the norm before the MLP, four float32 tensors and the shared tensors.
        norm = (e + 4 * FLOAT32_BYTES) * model.hidden_size + _shared_bytes_per_token(cell)
        moments = [
            _tile_backward_bytes(cell, rows) + engine.layer_gradients,
            rows * norm + engine.kept_head_gradient,
        ]
    scores = STRATEGIES[cell.strategy].scores_bytes(cell)
    return max(*moments, scores + engine.layer_gradients if scores else 0)


def _tile_backward_bytes(cell: Cell, rows: int) -> int:
    """Return the bytes of a tiled MLP's backward.

    A tile has 6ef + eh per row: all tensors that an MLP saves, with their gradients. The gradients of the
    MLP's input and output have 2eh per row of the shard.
    """
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    tile = min(rows, model.hidden_size)  # rows of a tile in `training.activation_memory`
    return e * (2 * rows * model.hidden_size + tile * (6 * model.intermediate_size + model.hidden_size))


def _attention_backward_bytes(cell: Cell, rows: int) -> int:
    """Return the bytes that attention's backward adds to the tensors that the layer saved, which may be
    negative.

    It adds e(h + 2q + 2k) per row: gradients of the layer's output, of Q, K, V and of attention's output. The
    flash kernel of a CPU repeats grouped K and V and their gradients, which adds 4eq. The saved tensors of
    the MLP, its norm and its input have been freed before, and are subtracted.
    """
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    q, kv = q_size(model), kv_size(model)
    gradients = e * (model.hidden_size + 2 * q + 2 * kv)
    states_memory = STRATEGIES[cell.strategy].call_memory(cell) is not None
    repeated = 4 * e * q if kernel_repeats_kv(cell) and not states_memory else 0
    freed = _norm_bytes(cell, model.hidden_size) + FLOAT32_BYTES + e * model.hidden_size
    freed += 0 if cell.tiled_mlp else _mlp_bytes_per_token(cell)
    return rows * (gradients + repeated - freed + _shared_bytes_per_token(cell))


def wide_copies_bytes(cell: Cell) -> int:
    """Return the bytes of float32 copies in a kernel's backward on a CPU without 16-bit instructions.

    For one head per thread these are dout, Q, K, V, the output and three gradients, 32 bytes per number
    (`bench/attention/kernels/torch_flash.py`). The result is 0 on other devices.
    """
    is_narrow = cell.cluster.device == "cpu" and DTYPE_BYTES[cell.dtype] < FLOAT32_BYTES
    if not is_narrow or cell.kernel not in WIDE_KERNELS or estimated_bf16_instructions():
        return 0
    heads = min(cell.cluster.threads_per_rank, cell.model.num_heads // cell.ulysses_degree)
    tokens = cell.batch * cell.shard_len * cell.ulysses_degree
    return 8 * FLOAT32_BYTES * heads * tokens * cell.model.head_dim


def communication_bytes(cell: Cell) -> int:
    """Return the peak bytes of the buffers of attention communication in one backward, on the rank with most.

    Gathered tensors stay until the end of the call. If a call gathers several parts, two exist at a time. A
    strategy may state the memory of a call itself. The result is then that memory without the gradients of
    Q, K and V.
    """
    facts = STRATEGIES[cell.strategy]
    call_memory = facts.call_memory(cell)
    if call_memory is not None:
        return call_memory.backward - activation_bytes(
            cell, cell.model.num_heads + 2 * kv_heads_with_repeats(cell)
        )
    schedules = [facts.rank_schedule(cell, rank) for rank in facts.extreme_ranks(cell)]
    return max(0 if schedule is None else _buffer_bytes(schedule.backward) for schedule in schedules)


def _buffer_bytes(stages: Stages) -> int:
    gathered = [
        communication.sent_bytes * communication.ranks // max(1, communication.ranks - 1)
        for stage in stages
        for communication in stage.communications
        if communication.kind == "all_gather"
    ]
    return sum(sorted(gathered)[-2:]) + max((_stage_bytes(stage) for stage in stages), default=0)


def _stage_bytes(stage: Stage) -> int:
    """Return the bytes of a stage: merged gradients, packed copies, receive buffers and send buffers.

    A message that is a packed copy needs no further send buffer.
    """
    if stage.buffer_bytes is not None:
        return stage.merged_bytes + stage.buffer_bytes
    messages = stage.communications
    received = sum(message.sent_bytes for message in messages if message.kind in ("send", "all_to_all"))
    sent = sum(message.sent_bytes for message in messages if message.kind != "all_gather")
    return stage.merged_bytes + stage.packed_bytes + received + (0 if stage.packed_bytes else sent)


def _norm_bytes(cell: Cell, size: int) -> int:
    """Return the bytes that a norm saves per token: its input in float32 and its output before the weight."""
    return (FLOAT32_BYTES + stream_bytes(cell)) * size
