"""torch's `context_parallel`: by default it gathers all keys at once and is no ring; `alltoall` is one."""

from __future__ import annotations

from bench.strategies.ring.facts import Ring


class TorchCP(Ring):
    """Either rotation sends the bytes of our ring: P-1 hops of K and V, or one all-gather of them.

    The gradients of K and V are always sent hop by hop, in float32.
    """

    name = "torch_cp"
    packs = False
    why_it_packs_not = "torch's ring is given a causal flag and no boundaries"
    layouts = ("zigzag", "contiguous")
    # It merges blocks in float32 whatever the inputs are, so float64 would not be float64.
    dtypes = ("bf16", "fp16", "fp32")
    package = "torch"
    options = {"rotation": ("allgather", "alltoall")}  # noqa: RUF012  torch's own words
    kernels = ("torch_flash", "cudnn")
