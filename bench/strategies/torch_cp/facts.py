"""Facts of torch's `context_parallel`, which gathers all keys, or passes them on with `rotation=alltoall`."""

from __future__ import annotations

from dataclasses import replace

from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts
from bench.strategies.schedule import Communication, Schedule, Stages


class TorchCPFacts(RingFacts):
    """Facts of `torch_cp`, whose two rotations send equal bytes: P-1 hops of K and V, or one all-gather.

    The gradients of K and V make P hops in float32 with either rotation.
    """

    name = "torch_cp"
    style = PlotStyle("#7F7F7F", "h", ":")
    supports_documents = False
    keeps_local_gradients = False
    no_documents_reason = (
        "torch supports documents only in its ring of flex_attention, which is not a kernel here"
    )
    layouts = ("zigzag", "contiguous")
    # Blocks are always merged in float32, so float64 would not have its precision.
    dtypes = ("bf16", "fp16", "fp32")
    package = "torch"
    options = {"rotation": ("allgather", "alltoall")}  # noqa: RUF012  torch's words
    kernels = ("torch_flash", "cudnn")

    def schedule(self, cell: Cell) -> Schedule:
        """Return the schedule of `ring`; `rotation=allgather` replaces hops of K and V by one all-gather."""
        ring = super().schedule(cell)
        if cell.option("rotation") == "alltoall":
            return ring
        return Schedule(_gather_keys_at_once(ring.forward), _gather_keys_at_once(ring.backward))

    def hop(self, cell: Cell, sent_bytes: int) -> Communication:
        """Return an all-to-all in which a rank sends to the next one only, which is how torch makes a hop."""
        return replace(super().hop(cell, sent_bytes), kind="all_to_all", to_next=True)


def _gather_keys_at_once(stages: Stages) -> Stages:
    """Replace the hops of K and V, the first communication of each block but the last, by one all-gather."""
    blocks = sum(bool(stage.blocks) for stage in stages)
    hops = [stage.communications[0] for stage in stages[: blocks - 1]]
    if not hops:
        return stages
    all_gather = Communication(
        "all_gather", sum(hop.sent_bytes for hop in hops), hops[0].ranks, hops[0].stride
    )
    first, *rest = stages
    without_hops = [
        replace(stage, communications=stage.communications[1:]) for stage in rest[: len(hops) - 1]
    ]
    return (replace(first, communications=(all_gather,)), *without_hops, *rest[len(hops) - 1 :])
