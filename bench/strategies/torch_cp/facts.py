"""torch's `context_parallel`: by default it gathers all keys at once and is no ring; `alltoall` is one."""

from __future__ import annotations

from dataclasses import replace

from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts
from bench.strategies.schedule import Communication, Schedule, Stages


class TorchCPFacts(RingFacts):
    """Either rotation sends the same bytes: P-1 hops of K and V, or one all-gather of them.

    The gradients of K and V are always sent hop by hop, in float32, and make P hops.
    """

    name = "torch_cp"
    style = PlotStyle("#7F7F7F", "h", ":")
    packs = False
    first_gradients_wait = False
    why_it_packs_not = "torch knows documents in its ring of flex_attention, which is no kernel here"
    layouts = ("zigzag", "contiguous")
    # It merges blocks in float32 whatever the inputs are, so float64 would not be float64.
    dtypes = ("bf16", "fp16", "fp32")
    package = "torch"
    options = {"rotation": ("allgather", "alltoall")}  # noqa: RUF012  torch's own words
    kernels = ("torch_flash", "cudnn")

    def schedule(self, cell: Cell) -> Schedule:
        """As our ring's, but for what `rotation` says of keys and values."""
        ring = super().schedule(cell)
        if cell.option("rotation") == "alltoall":
            return ring
        return Schedule(_gathered(ring.forward), _gathered(ring.backward))

    def hop(self, cell: Cell, sent_bytes: int) -> Communication:
        """An all-to-all in which each rank sends to one: so torch permutes."""
        return replace(super().hop(cell, sent_bytes), kind="all_to_all", to_next=True)


def _gathered(stages: Stages) -> Stages:
    """The hops of the keys, one behind each block but the last, as one gathering behind the first."""
    hops = [stage.communications[0] for stage in stages[: _blocks(stages) - 1]]
    if not hops:
        return stages
    gathered = Communication("all_gather", sum(hop.sent_bytes for hop in hops), hops[0].ranks, hops[0].stride)
    first, *rest = stages
    kept = [replace(stage, communications=stage.communications[1:]) for stage in rest[: len(hops) - 1]]
    return (replace(first, communications=(gathered,)), *kept, *rest[len(hops) - 1 :])


def _blocks(stages: Stages) -> int:
    return sum(bool(stage.blocks) for stage in stages)
