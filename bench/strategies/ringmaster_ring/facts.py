"""Facts of ringmaster's rings, which gather all keys, pass them on, or balance causal work in two ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.attention.kernel_facts import FLASH_ATTN
from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import ScheduledFacts, activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Block, Communication, Schedule, Stage, ring_blocks, tensor_bytes

FLOAT32_BYTES = 4
ROTATION = "rotation"
ALLGATHER, P2P, HEAD_TAIL, DISTFLASH = "allgather", "p2p", "head_tail", "distflash"
TORCH_KERNEL = "torch_flash"
EQUIVALENT_KERNELS: Mapping[str, str] = {P2P: "math", HEAD_TAIL: TORCH_KERNEL, DISTFLASH: TORCH_KERNEL}
"""Kernel that rounds as the package does where the package computes scores itself, by rotation.

For the balanced rings it is a flash kernel, as both round the output to the cell's dtype before backward.
"""
BALANCED = (HEAD_TAIL, DISTFLASH)
"""Rotations that are values of the package's setting `load_balance`, which then determines how keys move."""


class RingmasterRingFacts(ScheduledFacts):
    name = "ringmaster_ring"
    style = PlotStyle("#44AA99", "8", "--")
    supports_documents = True
    layouts = ("contiguous", "zigzag")
    package = "axolotl-ringmaster"
    flash_attn_kernels = (FLASH_ATTN, "math")  # with `math`, some rotations compute scores themselves
    tested_version = "0.2.7"
    options = {ROTATION: (ALLGATHER, P2P, HEAD_TAIL, DISTFLASH)}  # noqa: RUF012  constant
    sends_unevenly = True

    def layouts_with(self, options: Mapping[str, str]) -> tuple[str, ...]:
        return ("zigzag",) if options[ROTATION] == HEAD_TAIL else ("contiguous",)

    def balances_causal_area(self, cell: Cell) -> bool:
        return cell.option(ROTATION) == DISTFLASH

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *kernel_refusals(cell)]

    def autocast_refusals(self, cell: Cell) -> list[str]:
        return autocast_refusals(cell)

    def mask_refusals(self, cell: Cell) -> list[str]:
        if cell.option(ROTATION) not in BALANCED or cell.workload.mask == "causal":
            return super().mask_refusals(cell)
        return [f"workload.mask=full is not for {with_rotation(cell)}; take workload.mask=causal"]

    def packing_refusals(self, cell: Cell) -> list[str]:
        return [*super().packing_refusals(cell), *ring_packing_refusals(cell)]

    def head_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which the model's number of heads is not legal.

        On CPU ranks and without documents, the backward of `distflash` does not repeat KV heads, so there
        must be as many KV heads as query heads.
        """
        model, repeats = cell.model, cell.cluster.device != "cpu" or cell.data.packs
        if cell.option(ROTATION) != DISTFLASH or repeats or model.num_kv_heads == model.num_heads:
            return []
        refused_by = f"{with_rotation(cell)} on CPU ranks, which does not repeat KV heads"
        way_out = f"take model.num_kv_heads={model.num_heads}, or strategy.{ROTATION}={P2P}"
        return [f"model.num_kv_heads={model.num_kv_heads} is not for {refused_by}; {way_out}"]

    def saved_bytes_per_token(self, cell: Cell) -> int:
        return ring_saved_bytes_per_token(cell)

    def scores_bytes(self, cell: Cell) -> int:
        return super().scores_bytes(replace(cell, kernel="math") if computes_scores(cell) else cell)

    def schedule(self, cell: Cell) -> Schedule:
        """Return the stages of the rank that sends most among the ranks with most blocks."""
        return self.rank_schedule(cell, cell.sp_degree - 1 - cell.sp_degree // 2)

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:
        if cell.option(ROTATION) == DISTFLASH and cell.sp_degree > 1:
            return balanced_schedule(cell, rank)
        return ring_schedule(cell, cell.model.num_heads, cell.model.num_kv_heads)


def with_rotation(cell: Cell) -> str:
    """Return the strategy and its rotation for a refusal."""
    return f"{cell.strategy} with strategy.{ROTATION}={cell.option(ROTATION)}"


def ring_packing_refusals(cell: Cell) -> list[str]:
    """Return the reasons for which ringmaster's rings cannot run packed documents.

    On one rank the package does not pass the documents' boundaries to the kernel. The balanced rings apply
    the boundaries of a batch's first sequence to all sequences.
    """
    if not cell.data.packs:
        return []
    if cell.sp_degree == 1:
        return [f"data.packing=documents is not for {cell.strategy} on one rank; take strategy=local"]
    if cell.option(ROTATION) in BALANCED and cell.batch > 1:
        refused_by, way_out = (
            with_rotation(cell),
            f"take batch=1 and grad_accum={cell.batch * cell.grad_accum}",
        )
        reason = "it masks all sequences of a batch by the documents of the first"
        return [
            f"data.packing=documents with batch={cell.batch} is not for {refused_by}: {reason}; {way_out}"
        ]
    return []


def computes_scores(cell: Cell) -> bool:
    """Return whether the package calls no kernel and computes all scores of a block in float32.

    It does so on CPU ranks in the rings that pass keys on, and on any rank in its zigzag ring over documents.
    """
    rotation, packs = cell.option(ROTATION), cell.data.packs
    if rotation == HEAD_TAIL:
        return packs
    return cell.cluster.device == "cpu" and (rotation == DISTFLASH or (rotation == P2P and not packs))


def kernel_refusals(cell: Cell) -> list[str]:
    """Return the reasons for which the kernel or the dtype is not legal.

    If the package computes scores itself, the cell must name the kernel of `EQUIVALENT_KERNELS` and a dtype
    other than fp64.
    """
    rotation, device = cell.option(ROTATION), cell.cluster.device
    chosen, other = (f"strategy.{ROTATION}={name}" for name in (rotation, ALLGATHER))
    if rotation == HEAD_TAIL and device == "cpu" and not cell.data.packs:
        return [f"{chosen} needs a GPU, as the package's zigzag ring runs on GPUs only; take {other}"]
    refused_by, kernel = _with_device(cell), f"kernel={cell.kernel}"
    if not computes_scores(cell):
        if device == "cpu" and cell.data.packs and cell.kernel not in EQUIVALENT_KERNELS.values():
            computes = "which computes with torch's masked attention"
            return [f"{kernel} is not for {refused_by}, {computes}; take kernel={TORCH_KERNEL}"]
        return []
    refusals, equivalent = [], EQUIVALENT_KERNELS[rotation]
    if cell.kernel != equivalent:
        refusals.append(
            f"{kernel} is not for {refused_by}, which computes all scores itself; take kernel={equivalent}"
        )
    if cell.dtype == "fp64":
        refusals.append(f"dtype=fp64 is not for {refused_by}, which computes in float32; take dtype=fp32")
    return [f"{refusal}, or {other}" for refusal in refusals]


def autocast_refusals(cell: Cell) -> list[str]:
    """Return the reasons for which the package cannot run under autocast, which rounds matrix products.

    There is one if the package computes scores itself, as it does so in float32.
    """
    if not computes_scores(cell):
        return []
    engine = f"engine={cell.engine.name} with dtype={cell.dtype} is not for {_with_device(cell)}"
    way_out = f"take engine=fsdp2 or zero3, or strategy.{ROTATION}={ALLGATHER}"
    return [f"{engine}, whose products autocast would round to {cell.dtype}; {way_out}"]


def _with_device(cell: Cell) -> str:
    documents = " and documents" if cell.data.packs else ""
    return f"{with_rotation(cell)}{documents} on {cell.cluster.device.upper()} ranks"


def ring_saved_bytes_per_token(cell: Cell) -> int:
    """Return the bytes per token that the last rank of a ring saves in addition to its Q, K, V and output.

    A ring that gathers saves K and V of the other ranks. On CPU ranks `p2p` saves K and V repeated to all
    query heads, and a second output in float32. Any other ring saves nothing more.
    """
    model, number_bytes = cell.model, DTYPE_BYTES[cell.dtype]
    if gathers_keys(cell):
        return (cell.ring_degree - 1) * 2 * model.num_kv_heads * number_bytes * model.head_dim
    if cell.ring_degree == 1 or cell.option(ROTATION) != P2P or cell.cluster.device != "cpu":
        return 0
    repeated = 2 * (model.num_heads - model.num_kv_heads) * number_bytes
    return (repeated + model.num_heads * FLOAT32_BYTES) * model.head_dim


def ring_schedule(cell: Cell, heads: int, kv_heads: int) -> Schedule:
    """Return the schedule of the package's ring over these heads of a ring shard."""
    if cell.ring_degree == 1:
        alone = (Stage(tuple(ring_blocks(cell, heads, kv_heads))),)
        return Schedule(alone, alone)
    make_schedule = _gather_schedule if gathers_keys(cell) else _pass_on_schedule
    return make_schedule(cell, heads, kv_heads)


def gathers_keys(cell: Cell) -> bool:
    """Return whether every rank gathers all keys, which `p2p` also does for packed documents."""
    rotation = cell.option(ROTATION)
    return rotation == ALLGATHER or (rotation == P2P and cell.data.packs)


def _gather_schedule(cell: Cell, heads: int, kv_heads: int) -> Schedule:
    """Return two all-gathers, of K and of V, and two reduce-scatters of their gradients in the cell's dtype.

    On gloo gradients are all-reduced instead, which sends twice the bytes.
    """
    ranks, stride = cell.ring_degree, cell.ring_stride
    shard_len = cell.padded_len // ranks
    shard_bytes = tensor_bytes(cell, kv_heads, shard_len)
    is_causal = cell.workload.mask == "causal"
    attention = Stage((Block(cell.batch, heads, kv_heads, shard_len, cell.padded_len, is_causal),))
    gather = Stage(communications=(Communication("all_gather", (ranks - 1) * shard_bytes, ranks, stride),))
    kind, times = ("all_reduce", 2) if cell.cluster.backend == "gloo" else ("reduce_scatter", 1)
    sum_gradients = Stage(
        communications=(Communication(kind, times * (ranks - 1) * shard_bytes, ranks, stride),)
    )
    return Schedule(forward=(gather, gather, attention), backward=(attention, sum_gradients, sum_gradients))


def _pass_on_schedule(cell: Cell, heads: int, kv_heads: int) -> Schedule:
    """Return the schedule of a ring of P ranks that passes K and V on.

    Forward has P-1 hops of K and V; backward has P hops of K and V, and as many of their gradients. On CPU
    ranks `p2p` calls no flash kernel and sends K and V repeated to all query heads, in float32.
    The zigzag ring sends all tensors in the cell's dtype. In backward it makes only P-1 hops of K and V, and
    only these are hidden by computation, because the package waits for every hop of gradients.
    """
    ranks, is_zigzag = cell.ring_degree, cell.option(ROTATION) == HEAD_TAIL
    shard_len = cell.padded_len // ranks
    sent_bytes = tensor_bytes(cell, 2 * kv_heads, shard_len)
    if cell.cluster.device == "cpu" and not is_zigzag:
        sent_bytes = tensor_bytes(cell, 2 * heads, shard_len) // DTYPE_BYTES[cell.dtype] * FLOAT32_BYTES
    hop = Communication("send", sent_bytes, ranks, cell.ring_stride)
    blocks, gradient_hop = ring_blocks(cell, heads, kv_heads), Stage(communications=(hop,))
    forward = (*(Stage((block,), (hop,), is_hidden=True) for block in blocks[:-1]), Stage((blocks[-1],)))
    if is_zigzag:
        return Schedule(
            forward, (*(part for stage in forward for part in (stage, gradient_hop)), gradient_hop)
        )
    return Schedule(forward, tuple(Stage((block,), (hop, hop), is_hidden=True) for block in blocks))


def balanced_schedule(cell: Cell, rank: int) -> Schedule:
    """Return the stages of the rotation `distflash` on `rank`: P-1 hops of keys, then P/2 hops of queries.

    No hop is hidden by computation. Keys go round the whole ring, although no rank computes with those of the
    first half of the hops. A rank that computes with received queries sends back their output and LSE. In
    backward the output, its gradient and the LSE are sent with the queries, and dq is sent back. On gloo
    every rank sends these backward tensors, even to a rank that does not need them.
    """
    model, ranks = cell.model, cell.sp_degree
    half, sends_always = ranks // 2, cell.cluster.backend == "gloo"
    q, kv = activation_bytes(cell, model.num_heads), activation_bytes(cell, 2 * model.num_kv_heads)
    lse = q // (model.head_dim * DTYPE_BYTES[cell.dtype]) * FLOAT32_BYTES
    local, full = (
        Stage((Block(cell.batch, model.num_heads, model.num_kv_heads, *(cell.shard_len,) * 2, masked),))
        for masked in (True, False)
    )

    def send(size: int) -> Stage:
        return Stage(communications=(Communication("send", size, ranks),))

    forward, backward = [local], [local]
    for hop in range(1, ranks):
        computed = [full] if hop > half and rank >= hop else []
        forward += [send(kv), *computed]
        backward += [send(kv), *computed, send(kv)]
    for hop in range(1, half + 1):
        helps, is_helped = rank + hop < ranks, rank >= hop
        forward += [send(q), *([full, send(q + lse)] if helps else [])]
        backward += [send(q), *([send(3 * q + lse)] if is_helped or sends_always else [])]
        backward += [*([full] if helps else []), *([send(q)] if helps or sends_always else [])]
    return Schedule(tuple(forward), tuple(backward))
