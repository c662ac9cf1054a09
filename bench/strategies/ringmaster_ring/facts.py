"""ringmaster's ring: all keys gathered at once, as it does by default, or passed on; and two balanced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import ScheduledFacts, activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Block, Communication, Schedule, Stage, ring_blocks, tensor_bytes

FLOAT32_BYTES = 4
ROTATION = "rotation"
ALLGATHER, P2P, HEAD_TAIL, DISTFLASH = "allgather", "p2p", "head_tail", "distflash"
TORCH_KERNEL = "torch_flash"
OWN_KERNELS: Mapping[str, str] = {P2P: "math", HEAD_TAIL: TORCH_KERNEL, DISTFLASH: TORCH_KERNEL}
"""The kernel that errs as the package does where it calls none: the balanced rings round the output to the
cell's dtype before backward, as flash kernels do."""
BALANCED = (HEAD_TAIL, DISTFLASH)
"""What the package calls its `load_balance`; either has its own way to rotate keys."""


class RingmasterRingFacts(ScheduledFacts):
    name = "ringmaster_ring"
    style = PlotStyle("#44AA99", "8", "--")
    packs = True
    layouts = ("contiguous", "zigzag")
    package = "axolotl-ringmaster"
    tried = "0.2.7"
    options = {ROTATION: (ALLGATHER, P2P, HEAD_TAIL, DISTFLASH)}  # noqa: RUF012  a class's own constant
    sends_unevenly = True

    def layouts_with(self, options: Mapping[str, str]) -> tuple[str, ...]:
        return ("zigzag",) if options[ROTATION] == HEAD_TAIL else ("contiguous",)

    def balances(self, cell: Cell) -> bool:
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
        return [*super().packing_refusals(cell), *boundary_refusals(cell)]

    def head_refusals(self, cell: Cell) -> list[str]:
        """Its balanced contiguous ring repeats no KV head in backward, on a CPU and without documents."""
        model, repeats = cell.model, cell.cluster.device != "cpu" or cell.data.packs
        if cell.option(ROTATION) != DISTFLASH or repeats or model.num_kv_heads == model.num_heads:
            return []
        who = f"{with_rotation(cell)} on CPU ranks, which repeats none"
        way_out = f"take model.num_kv_heads={model.num_heads}, or strategy.{ROTATION}={P2P}"
        return [f"model.num_kv_heads={model.num_kv_heads} is not for {who}; {way_out}"]

    def kept_bytes_per_token(self, cell: Cell) -> int:
        return kept_by_ring(cell)

    def scores_bytes(self, cell: Cell) -> int:
        return super().scores_bytes(replace(cell, kernel="math") if takes_scores(cell) else cell)

    def schedule(self, cell: Cell) -> Schedule:
        """That of a rank with most blocks and, among those, most to send."""
        return self.rank_schedule(cell, cell.sp_degree - 1 - cell.sp_degree // 2)

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:
        if cell.option(ROTATION) == DISTFLASH and cell.sp_degree > 1:
            return balanced_schedule(cell, rank)
        return ring_schedule(cell, cell.model.num_heads, cell.model.num_kv_heads)


def with_rotation(cell: Cell) -> str:
    """The strategy and its choice, as refusals name them."""
    return f"{cell.strategy} with strategy.{ROTATION}={cell.option(ROTATION)}"


def boundary_refusals(cell: Cell) -> list[str]:
    """One rank hands over no boundaries. The balanced rings know those of the first sequence of a batch."""
    if not cell.data.packs:
        return []
    if cell.sp_degree == 1:
        return [f"data.packing=documents is not for {cell.strategy} on one rank; take strategy=local"]
    if cell.option(ROTATION) in BALANCED and cell.batch > 1:
        who, way_out = with_rotation(cell), f"take batch=1 and grad_accum={cell.batch * cell.grad_accum}"
        reason = "it masks every sequence by the documents of the first"
        return [f"data.packing=documents with batch={cell.batch} is not for {who}: {reason}; {way_out}"]
    return []


def takes_scores(cell: Cell) -> bool:
    """Whether the package calls no kernel: it computes all scores of a block at once, in float32.

    So it does on CPU ranks where it passes keys, and anywhere in its zigzag ring over documents.
    """
    rotation, packs = cell.option(ROTATION), cell.data.packs
    if rotation == HEAD_TAIL:
        return packs
    return cell.cluster.device == "cpu" and (rotation == DISTFLASH or (rotation == P2P and not packs))


def kernel_refusals(cell: Cell) -> list[str]:
    """Where it calls no kernel, ours that does the same has to be named, and no dtype that it has not."""
    rotation, device = cell.option(ROTATION), cell.cluster.device
    chosen, other = (f"strategy.{ROTATION}={each}" for each in (rotation, ALLGATHER))
    if rotation == HEAD_TAIL and device == "cpu" and not cell.data.packs:
        return [f"{chosen} needs a GPU, as the package's zigzag ring computes there only; take {other}"]
    who, kernel = _with_device(cell), f"kernel={cell.kernel}"
    if not takes_scores(cell):
        if device == "cpu" and cell.data.packs and cell.kernel not in OWN_KERNELS.values():
            computes = "which computes with torch's masked attention"
            return [f"{kernel} is not for {who}, {computes}; take kernel={TORCH_KERNEL}"]
        return []
    refusals, own = [], OWN_KERNELS[rotation]
    if cell.kernel != own:
        refusals.append(f"{kernel} is not for {who}, which computes all scores itself; take kernel={own}")
    if cell.dtype == "fp64":
        refusals.append(f"dtype=fp64 is not for {who}, which computes in float32; take dtype=fp32")
    return [f"{refusal}, or {other}" for refusal in refusals]


def autocast_refusals(cell: Cell) -> list[str]:
    """Return why products that the package takes of float32 scores cannot be rounded by autocast."""
    if not takes_scores(cell):
        return []
    engine = f"engine={cell.engine.name} with dtype={cell.dtype} is not for {_with_device(cell)}"
    way_out = f"take engine=fsdp2 or zero3, or strategy.{ROTATION}={ALLGATHER}"
    return [f"{engine}, which has its products rounded to {cell.dtype} by autocast; {way_out}"]


def _with_device(cell: Cell) -> str:
    documents = " and documents" if cell.data.packs else ""
    return f"{with_rotation(cell)}{documents} on {cell.cluster.device.upper()} ranks"


def kept_by_ring(cell: Cell) -> int:
    """What a ring's last rank saves beside its own, per token: all that it gathered.

    Passing keys on a CPU, those of all query heads, and the output in float32 beside the one it returns.
    """
    model, number_bytes = cell.model, DTYPE_BYTES[cell.dtype]
    if gathers(cell):
        return (cell.ring_degree - 1) * 2 * model.num_kv_heads * number_bytes * model.head_dim
    if cell.ring_degree == 1 or cell.option(ROTATION) != P2P or cell.cluster.device != "cpu":
        return 0
    repeated = 2 * (model.num_heads - model.num_kv_heads) * number_bytes
    return (repeated + model.num_heads * FLOAT32_BYTES) * model.head_dim


def ring_schedule(cell: Cell, heads: int, kv_heads: int) -> Schedule:
    """A ring of the package over these heads of a ring shard; nothing is sent in one of a single rank."""
    if cell.ring_degree == 1:
        alone = (Stage(tuple(ring_blocks(cell, heads, kv_heads))),)
        return Schedule(alone, alone)
    return (_gathered if gathers(cell) else _passed)(cell, heads, kv_heads)


def gathers(cell: Cell) -> bool:
    """Whether every rank has all keys: of packed documents also where they are to be passed on."""
    rotation = cell.option(ROTATION)
    return rotation == ALLGATHER or (rotation == P2P and cell.data.packs)


def _gathered(cell: Cell, heads: int, kv_heads: int) -> Schedule:
    """K and V are gathered apart, and so are their gradients reduced and scattered, in the cell's dtype.

    On gloo they are all-reduced instead: twice the bytes.
    """
    ranks, stride = cell.ring_degree, cell.ring_stride
    shard_len = cell.padded_len // ranks
    shard_bytes = tensor_bytes(cell, kv_heads, shard_len)
    is_causal = cell.workload.mask == "causal"
    attention = Stage((Block(cell.batch, heads, kv_heads, shard_len, cell.padded_len, is_causal),))
    gather = Stage(communications=(Communication("all_gather", (ranks - 1) * shard_bytes, ranks, stride),))
    kind, times = ("all_reduce", 2) if cell.cluster.backend == "gloo" else ("reduce_scatter", 1)
    home = Stage(communications=(Communication(kind, times * (ranks - 1) * shard_bytes, ranks, stride),))
    return Schedule(forward=(gather, gather, attention), backward=(attention, home, home))


def _passed(cell: Cell, heads: int, kv_heads: int) -> Schedule:
    """K and V make P-1 hops in forward, and in backward P, the last of which nobody waits for; gradients P.

    A CPU has no flash kernel for the package: there it sends K and V of all query heads, in float32. The
    zigzag ring makes P-1 hops of keys in backward too, all in the cell's dtype, and only those of keys are
    hidden: the package waits for each hop of gradients before it goes on, and for the last one of keys.
    """
    ranks, is_zigzag = cell.ring_degree, cell.option(ROTATION) == HEAD_TAIL
    shard_len = cell.padded_len // ranks
    sent_bytes = tensor_bytes(cell, 2 * kv_heads, shard_len)
    if cell.cluster.device == "cpu" and not is_zigzag:
        sent_bytes = tensor_bytes(cell, 2 * heads, shard_len) // DTYPE_BYTES[cell.dtype] * FLOAT32_BYTES
    hop = Communication("send", sent_bytes, ranks, cell.ring_stride)
    blocks, home = ring_blocks(cell, heads, kv_heads), Stage(communications=(hop,))
    forward = (*(Stage((block,), (hop,), is_hidden=True) for block in blocks[:-1]), Stage((blocks[-1],)))
    if is_zigzag:
        return Schedule(forward, (*(part for stage in forward for part in (stage, home)), home))
    return Schedule(forward, tuple(Stage((block,), (hop, hop), is_hidden=True) for block in blocks))


def balanced_schedule(cell: Cell, rank: int) -> Schedule:
    """The contiguous ring that lends work: P-1 hops of keys, then half as many of queries, none hidden.

    Hops of keys go all the way round, though the first half of them is not computed with. A rank that has
    another's queries gives back output and LSE; in backward it is lent the output's gradient, the output
    and the LSE as well, and gives back dq. Over gloo ranks send these in backward though nobody needs them.
    """
    model, ranks = cell.model, cell.sp_degree
    half, sends_always = ranks // 2, cell.cluster.backend == "gloo"
    q, kv = activation_bytes(cell, model.num_heads), activation_bytes(cell, 2 * model.num_kv_heads)
    lse = q // (model.head_dim * DTYPE_BYTES[cell.dtype]) * FLOAT32_BYTES
    own, whole = (
        Stage((Block(cell.batch, model.num_heads, model.num_kv_heads, *(cell.shard_len,) * 2, masked),))
        for masked in (True, False)
    )

    def send(size: int) -> Stage:
        return Stage(communications=(Communication("send", size, ranks),))

    forward, backward = [own], [own]
    for hop in range(1, ranks):
        computed = [whole] if hop > half and rank >= hop else []
        forward += [send(kv), *computed]
        backward += [send(kv), *computed, send(kv)]
    for hop in range(1, half + 1):
        helps, is_helped = rank + hop < ranks, rank >= hop
        forward += [send(q), *([whole, send(q + lse)] if helps else [])]
        backward += [send(q), *([send(3 * q + lse)] if is_helped or sends_always else [])]
        backward += [*([whole] if helps else []), *([send(q)] if helps or sends_always else [])]
    return Schedule(tuple(forward), tuple(backward))
