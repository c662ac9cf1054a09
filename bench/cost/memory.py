"""What one rank needs of its device's memory in a training step: an estimate, term by term.

Five moments can be the fullest: building, the loss, the backward of one layer and of its attention, and
the update at a step's end. Written for the formulas: h is the hidden size, f the intermediate size, q and k
all query and all KV heads' sizes, V the vocabulary, e the bytes of a number in the cell's dtype, R the tokens
that one rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.common.cpu_arithmetic import estimated_bf16_instructions
from bench.common.labels import GIB
from bench.config import DTYPE_BYTES, Cell
from bench.cost.band import Band
from bench.strategies import STRATEGIES
from bench.strategies.facts import activation_bytes, kv_heads_held, repeats_kv
from bench.strategies.schedule import Stage, Stages
from bench.training.engines import ENGINE_FACTS, is_autocast, stream_bytes
from bench.training.engines.facts import EngineMemory
from bench.training.parameters import FLOAT32_BYTES, HEAD_NORM_FAMILIES, head_parameters, kv_size, q_size
from bench.training.trainer_facts import NATIVE

TOKEN_BYTES = 8
WIDE_KERNELS = ("torch_flash", "flash_blocks")
CHUNK_ROWS = 1024
"""Rows of logits of a chunked loss: CHUNK_TOKENS of bench/training/loss.py, which imports torch."""
CONTEXT_BYTES = GIB
"""CUDA's context and libraries take 0.5 to 0.7 GiB by public out-of-memory messages (memory in use beyond
torch's own); the rest is room for NCCL's buffers, which nothing here measures."""
FORMULA_SHARE = 0.03
"""Share of the tensors' bytes by which a peak may differ from the formula. Nine in ten measured peaks of CPU
ranks in results/reference/ differ by less (docs/published_memory.md)."""
CONTEXT_GIB = (0.5, 2.5)
"""CUDA's context and libraries take 0.5 to 0.7 GiB by public out-of-memory messages; NCCL's buffers, for each
group of ranks that share a channel, are not measured by us: 2 GiB are left for them."""
FRAGMENTATION_SHARE = 0.15
"""Memory that the caching allocator holds and cannot use, as a share of the tensors' bytes: the average over
eight models with recomputation, sharding and offloading (GMLake, arXiv:2401.08156). It may be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank."""

    states: int
    """Parameters, gradients and optimizer state: this rank's shard of them."""
    gathered: int
    """Weights of other shards that are held at once, or low-precision copies of one's own."""
    activations: int
    """Saved for backward from all layers; with checkpointing, of each layer its input, if that stays here."""
    loss: int
    """At the loss: logits with their gradient, the last norm, the head's gradient."""
    layer: int
    """In one layer's backward: gradients of activations and weights; with checkpointing, its activations."""
    attention: int
    """In the backward of its attention, once that of its MLP is over."""
    communication: int
    """Beside the former: buffers of what attention exchanges, and wide partial gradients."""
    update: int
    """At a step's end: gradients as the engine reduces them and as the optimizer takes them."""
    loading: int
    """In place of all others, while the model is built: its shard, and one part whole in float32."""
    context: int
    """What the process takes beside tensors."""

    @property
    def total(self) -> int:
        """The bytes of the fullest moment."""
        return self.allocated + self.context

    @property
    def allocated(self) -> int:
        """Those of tensors."""
        return max(self.loading, self.states + self.step)

    @property
    def step(self) -> int:
        """What comes and goes within a step, at the fullest moment."""
        moment = max(self.loss, self.layer, self.attention + self.communication)
        return max(self.gathered + self.activations + moment, self.update)


def memory_need(cell: Cell) -> MemoryNeed | None:
    """The estimate for a cell that trains; None for other workloads."""
    if not cell.workload.trains:
        return None
    engine = ENGINE_FACTS[cell.engine.name].memory(cell)
    rows, layers = cell.batch * cell.shard_len, cell.model.num_layers
    facts = STRATEGIES[cell.strategy]
    saved = rows * layer_bytes_per_token(cell)
    of_attention = facts.checkpointed_bytes(cell)
    of_layer = rows * stream_bytes(cell) * cell.model.hidden_size + of_attention
    kept = of_layer if cell.checkpointing else saved
    last_norm = rows * _last_norm_bytes_per_token(cell)
    # Offloaded inputs wait in another memory, but for the one at hand; a CPU rank has one memory.
    stay = kept if cell.offload.activations and cell.cluster.device == "cuda" else layers * kept
    # A norm's gradient as it arrives, and three tensors in float32.
    norm_backward = rows * (DTYPE_BYTES[cell.dtype] + 3 * FLOAT32_BYTES) * cell.model.hidden_size
    again = saved - of_attention if cell.checkpointing else 0
    arrived = max(0, kept + engine.arriving - stay)  # by the last layer's backward, whose input alone is left
    # Less than nothing where more is gone by then than comes: that is room for what is exchanged.
    attention = arrived + again + _attention_backward_bytes(cell, rows) + engine.kept_head_gradient
    attention += wide_copies_bytes(cell)
    return MemoryNeed(
        states=engine.states,
        gathered=engine.gathered,
        activations=stay,
        loss=last_norm - rows * DTYPE_BYTES[cell.dtype] * cell.model.hidden_size + _loss_bytes(cell, rows),
        layer=max(
            last_norm + norm_backward + engine.layer_gradients,
            again + _layer_backward_bytes(cell, rows, engine) + arrived,
        ),
        attention=max(0, attention),
        communication=max(0, communication_bytes(cell) + min(0, attention)),
        update=engine.update,
        loading=engine.loading,
        context=CONTEXT_BYTES if cell.cluster.device == "cuda" else 0,
    )


def allocated_band(cell: Cell, need: MemoryNeed) -> Band:
    """Bytes of tensors at the fullest moment, and how far they may be from the formula.

    Both ends are what a rank needs if all that is not known turns out well, or badly, at once.
    """
    expected = need.allocated
    engine = ENGINE_FACTS[cell.engine.name].memory(cell)
    spread = round(FORMULA_SHARE * expected)
    return Band(expected - spread - engine.spare, expected, expected + spread + engine.beyond)


def needed_band(cell: Cell, need: MemoryNeed) -> Band:
    """Bytes that a rank needs: tensors, what the process takes beside them, what its allocator cannot use."""
    allocated = allocated_band(cell, need)
    if cell.cluster.device != "cuda":
        return allocated
    least, most = (round(gib * GIB) for gib in CONTEXT_GIB)
    high = round(allocated.high * (1 + FRAGMENTATION_SHARE)) + most
    return Band(allocated.low + least, need.total, high)


def layer_bytes_per_token(cell: Cell) -> int:
    """What one layer saves for backward, per token of a rank: exact where torch's hooks were asked on a CPU.

    Both norms (4 + e)h + 4, each head's norm the same of its size; the projections' inputs 2eh; Q, K, V and
    the output 2e(q + k) with the LSE, and what a strategy keeps of them beside that; the MLP 4ef, unless it
    is tiled. Under autocast norms hold 8h and every projection casts its input anew.
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
    attention = 2 * e * (q + kv_heads_held(cell) * model.head_dim) + lse
    attention += STRATEGIES[cell.strategy].kept_bytes_per_token(cell)
    mlp = 0 if cell.tiled_mlp else _mlp_bytes_per_token(cell)
    return norms + head_norms + inputs + attention + mlp


def _mlp_bytes_per_token(cell: Cell) -> int:
    """Both projections, the activation and their product."""
    return 4 * DTYPE_BYTES[cell.dtype] * cell.model.intermediate_size


def _last_norm_bytes_per_token(cell: Cell) -> int:
    """The last norm, the head's input and its gradient; token ids, and the angles that all layers share."""
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    norm = _norm_bytes(cell, model.hidden_size) + FLOAT32_BYTES
    return norm + 2 * e * model.hidden_size + _shared_bytes_per_token(cell)


def _shared_bytes_per_token(cell: Cell) -> int:
    """Token ids, and the angles that all layers share."""
    return 2 * DTYPE_BYTES[cell.dtype] * cell.model.head_dim + 2 * TOKEN_BYTES


def _loss_bytes(cell: Cell, rows: int) -> int:
    """Three wide tensors of [rows, V]: log-softmax, its gradient and the logits'; of one chunk or of all.

    Then the logits' wide gradient, its copy in the cell's dtype, and the head's gradient made of that. Of
    several chunks the head's gradient of those before is there all the time. Somebody else's training stack
    keeps the logits of shared sequences, whose loss it computes outside the model.
    """
    e, wide = DTYPE_BYTES[cell.dtype], max(FLOAT32_BYTES, DTYPE_BYTES[cell.dtype])
    at_once = min(rows, CHUNK_ROWS) if cell.loss == "chunked" else rows
    head_gradient, logits = e * head_parameters(cell.model), cell.model.vocab_size * at_once
    before = head_gradient if at_once < rows else 0
    if cell.trainer != NATIVE and cell.sp_degree > 1:
        before += e * logits
    return before + max(3 * wide * logits, (wide + e) * logits + head_gradient)


def _layer_backward_bytes(cell: Cell, rows: int, engine: EngineMemory) -> int:
    """What a layer's backward adds to what the layer saved; scores that are in memory at once count as well.

    The fullest moment is that of the MLP, 2ef + eh. Where it is tiled, that of a tile or of the norm before.
    """
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    moments = [rows * e * (2 * model.intermediate_size + model.hidden_size) + engine.layer_gradients]
    if cell.tiled_mlp:
        # The norm before the MLP: its gradient as it arrives, four tensors in float32; what all layers share.
        norm = (e + 4 * FLOAT32_BYTES) * model.hidden_size + _shared_bytes_per_token(cell)
        moments = [
            _tile_backward_bytes(cell, rows) + engine.layer_gradients,
            rows * norm + engine.kept_head_gradient,
        ]
    scores = STRATEGIES[cell.strategy].scores_bytes(cell)
    return max(*moments, scores + engine.layer_gradients if scores else 0)


def _tile_backward_bytes(cell: Cell, rows: int) -> int:
    """Of a tile all that an MLP saves and its gradients, 6ef + eh; of all rows both ends' gradients, 2eh."""
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    tile = min(rows, model.hidden_size)  # a tile has as many rows: `training.activation_memory`
    return e * (2 * rows * model.hidden_size + tile * (6 * model.intermediate_size + model.hidden_size))


def _attention_backward_bytes(cell: Cell, rows: int) -> int:
    """Gradients of the layer's output and of Q, K, V and attention's output, e(h + 2q + 2k).

    The MLP, its norm and its input are gone by then. A CPU's flash kernel repeats grouped K and V and has
    their gradients repeated too: 4eq.
    """
    model, e = cell.model, DTYPE_BYTES[cell.dtype]
    q, kv = q_size(model), kv_size(model)
    gradients = e * (model.hidden_size + 2 * q + 2 * kv)
    is_known = STRATEGIES[cell.strategy].call_memory(cell) is not None
    repeated = 4 * e * q if repeats_kv(cell) and not is_known else 0
    gone = _norm_bytes(cell, model.hidden_size) + FLOAT32_BYTES + e * model.hidden_size
    gone += 0 if cell.tiled_mlp else _mlp_bytes_per_token(cell)
    return rows * (gradients + repeated - gone + _shared_bytes_per_token(cell))


def wide_copies_bytes(cell: Cell) -> int:
    """Float32 copies in a kernel's backward, of the heads that it computes at once, 32 bytes a number.

    A CPU without 16-bit instructions has them: dout, Q, K, V, the output and three gradients, of a head for
    each thread (`bench/attention/kernels/torch_flash.py`).
    """
    is_narrow = cell.cluster.device == "cpu" and DTYPE_BYTES[cell.dtype] < FLOAT32_BYTES
    if not is_narrow or cell.kernel not in WIDE_KERNELS or estimated_bf16_instructions():
        return 0
    heads = min(cell.cluster.threads_per_rank, cell.model.num_heads // cell.ulysses_degree)
    tokens = cell.batch * cell.shard_len * cell.ulysses_degree
    return 8 * FLOAT32_BYTES * heads * tokens * cell.model.head_dim


def communication_bytes(cell: Cell) -> int:
    """Buffers of one backward of attention at its fullest stage on the rank that needs most.

    What is gathered at once stays until the end; where it is gathered in parts, one is there with the next.
    Of a strategy that knows what a call takes, that without the gradients of Q, K and V.
    """
    facts = STRATEGIES[cell.strategy]
    known = facts.call_memory(cell)
    if known is not None:
        return known.backward - activation_bytes(cell, cell.model.num_heads + 2 * kv_heads_held(cell))
    schedules = [facts.rank_schedule(cell, rank) for rank in facts.extreme_ranks(cell)]
    return max(0 if schedule is None else _buffer_bytes(schedule.backward) for schedule in schedules)


def _buffer_bytes(stages: Stages) -> int:
    gathered = [
        exchange.sent_bytes * exchange.ranks // max(1, exchange.ranks - 1)
        for stage in stages
        for exchange in stage.communications
        if exchange.kind == "all_gather"
    ]
    return sum(sorted(gathered)[-2:]) + max((_stage_bytes(stage) for stage in stages), default=0)


def _stage_bytes(stage: Stage) -> int:
    """Wide gradients, copies, and each message as it leaves, if it is no copy, and as another arrives."""
    if stage.held_bytes is not None:
        return stage.merged_bytes + stage.held_bytes
    arrives = sum(each.sent_bytes for each in stage.communications if each.kind in ("send", "all_to_all"))
    leaves = (
        0
        if stage.packed_bytes
        else sum(each.sent_bytes for each in stage.communications if each.kind != "all_gather")
    )
    return stage.merged_bytes + stage.packed_bytes + arrives + leaves


def _norm_bytes(cell: Cell, size: int) -> int:
    """What a norm saves of one token: its input in float32 and its output before the weight."""
    return (FLOAT32_BYTES + stream_bytes(cell)) * size
