"""ringmaster's ring: all keys gathered at once, as it does by default, or passed from rank to rank."""

from __future__ import annotations

from bench.config import DTYPE_BYTES, RunConfig
from bench.strategies.facts import ScheduledFacts
from bench.strategies.schedule import (
    Block,
    Exchange,
    Schedule,
    Stage,
    ring_blocks,
    tensor_bytes,
)

FLOAT32_BYTES = 4
OWN_KERNEL = "math"
"""Ours that does the same as the package's own attention for CPUs."""


PACKED_OTHERWISE = (
    "it then gathers all keys whatever the rotation, and on CPU ranks computes with torch's masked attention"
)


class RingmasterRing(ScheduledFacts):
    name = "ringmaster_ring"
    why_it_packs_not = PACKED_OTHERWISE
    package = "axolotl-ringmaster"
    tried = "0.2.7"
    options = {"rotation": ("allgather", "p2p")}  # noqa: RUF012  a class's own constant, as in torch_cp

    def counterpart(self, cell: RunConfig) -> str | None:
        return "ring" if cell.option("rotation") == "p2p" else "gather_kv"

    def refusals(self, cell: RunConfig) -> list[str]:
        return [*super().refusals(cell), *kernel_refusals(cell)]

    def kept_bytes_per_token(self, cell: RunConfig) -> int:
        return kept_by_ring(cell)

    def schedule(self, cell: RunConfig) -> Schedule:
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        return ring_schedule(cell, heads // cell.ulysses_degree, kv_heads // cell.ulysses_degree)


def kernel_refusals(cell: RunConfig) -> list[str]:
    """Passing keys on a CPU, the package calls no kernel: it computes all scores at once, and in float32.

    Under autocast, which is DDP's bf16, its products are rounded to bf16 all the same.
    """
    if cell.option("rotation") != "p2p" or cell.cluster.device != "cpu":
        return []
    who = f"{cell.strategy} with strategy.rotation=p2p on CPU ranks"
    reasons = []
    if cell.kernel != OWN_KERNEL:
        reasons.append(
            f"kernel={cell.kernel} is not for {who}, which computes all scores itself; take"
            f" kernel={OWN_KERNEL}, or strategy.rotation=allgather"
        )
    if cell.engine == "ddp" and cell.dtype == "bf16":
        reasons.append(
            f"engine=ddp with dtype=bf16 is not for {who}, whose products autocast rounds to bf16; take"
            " engine=fsdp2 or zero3, or strategy.rotation=allgather"
        )
    if cell.dtype == "fp64":
        reasons.append(
            f"dtype=fp64 is not for {who}, which computes in float32; take dtype=fp32, or"
            " strategy.rotation=allgather"
        )
    return reasons


def kept_by_ring(cell: RunConfig) -> int:
    """What a ring's last rank saves beside its own, per token: all that it gathered.

    Passing keys on a CPU, those of all query heads, and the output in float32 beside the one it returns.
    """
    model, number_bytes = cell.model, DTYPE_BYTES[cell.dtype]
    if cell.ring_degree == 1:
        return 0
    if cell.option("rotation") == "allgather":
        heads_bytes = (cell.ring_degree - 1) * 2 * model.num_kv_heads * number_bytes
    elif cell.cluster.device == "cpu":
        repeated = 2 * (model.num_heads - model.num_kv_heads) * number_bytes
        heads_bytes = repeated + model.num_heads * FLOAT32_BYTES
    else:
        heads_bytes = 0
    return heads_bytes * model.head_dim


def ring_schedule(cell: RunConfig, heads: int, kv_heads: int) -> Schedule:
    """A ring of the package over these heads of a ring shard; nothing is sent in one of a single rank."""
    if cell.option("rotation") == "allgather":
        return _gathered(cell, heads, kv_heads)
    return _passed(cell, heads, kv_heads)


def _gathered(cell: RunConfig, heads: int, kv_heads: int) -> Schedule:
    """K and V are gathered apart, and so are their gradients reduced and scattered, in the cell's dtype.

    On gloo they are all-reduced instead: twice the bytes.
    """
    ranks, stride = cell.ring_degree, cell.ring_stride
    shard_len = cell.padded_len // ranks
    shard_bytes = tensor_bytes(cell, kv_heads, shard_len)
    is_causal = cell.workload.mask == "causal"
    attention = Stage((Block(cell.batch, heads, kv_heads, shard_len, cell.padded_len, is_causal),))
    gather = Stage(exchanges=(Exchange("all_gather", (ranks - 1) * shard_bytes, ranks, stride),))
    if cell.cluster.backend == "gloo":
        reduced = Exchange("all_reduce", 2 * (ranks - 1) * shard_bytes, ranks, stride)
    else:
        reduced = Exchange("reduce_scatter", (ranks - 1) * shard_bytes, ranks, stride)
    home = Stage(exchanges=(reduced,))
    if ranks == 1:
        return Schedule(forward=(attention,), backward=(attention,))
    return Schedule(forward=(gather, gather, attention), backward=(attention, home, home))


def _passed(cell: RunConfig, heads: int, kv_heads: int) -> Schedule:
    """K and V make P-1 hops in forward, and in backward P, the last of which nobody waits for; gradients P.

    A CPU has no flash kernel for the package: there it sends K and V of all query heads, in float32.
    """
    ranks, stride = cell.ring_degree, cell.ring_stride
    shard_len = cell.padded_len // ranks
    sent_bytes = tensor_bytes(cell, 2 * kv_heads, shard_len)
    if cell.cluster.device == "cpu":
        sent_bytes = tensor_bytes(cell, 2 * heads, shard_len) // DTYPE_BYTES[cell.dtype] * FLOAT32_BYTES
    hop = Exchange("send", sent_bytes, ranks, stride)
    *blocks, last = ring_blocks(cell, heads, kv_heads)
    if not blocks:
        return Schedule(forward=(Stage((last,)),), backward=(Stage((last,)),))
    forward = [Stage((block,), (hop,), is_hidden=True) for block in blocks]
    backward = [Stage((block,), (hop, hop), is_hidden=True) for block in (*blocks, last)]
    return Schedule(forward=(*forward, Stage((last,))), backward=tuple(backward))
