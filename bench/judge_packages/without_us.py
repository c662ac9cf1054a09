"""How to see without this project what a package computes wrongly."""

from __future__ import annotations

from collections.abc import Mapping

ROUNDED_TO_BF16 = (
    "on two GPUs call the package's contiguous ring (`ring_flash_attn_func`; of yunchang's USP"
    ' `LongContextAttention(ring_impl_type="basic")`) on fp16 `q`, `k` and `v` and go backward. Then'
    " `(q.grad.bfloat16().half() == q.grad).all()` is true: its backward ends"
    " `return dq.to(torch.bfloat16), ...`, which takes three bits from each number."
)
AUTOCAST = (
    "on two CPU ranks call `ringmaster.ring.p2p_attn.ring_p2p_attention(q, k, v, group=dist.group.WORLD,"
    " causal=True, scaling=None)` on bf16 tensors of shape [1, 4, 128, 16], once under"
    ' `torch.autocast("cpu", torch.bfloat16)` and once without: against float64, the first errs several times'
    " as much. This is the package's path for a CPU; a GPU never takes it."
)
WITHOUT_US: Mapping[tuple[str, str], str] = {
    ("ring_flash_attn", "fp16"): ROUNDED_TO_BF16,
    ("yunchang_ring", "fp16"): ROUNDED_TO_BF16,
    ("yunchang_usp", "fp16"): ROUNDED_TO_BF16,
    ("ringmaster_ring", "ddp"): AUTOCAST,
    ("ringmaster_usp", "ddp"): AUTOCAST,
}
"""By strategy and the choice in the table's header."""
