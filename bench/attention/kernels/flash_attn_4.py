"""FlashAttention-4, for Hopper and Blackwell: the package flash-attn-4, called as torch's adapter calls it.

It compiles a kernel at the first call of each kind.
"""

from __future__ import annotations

from torch import Tensor

from bench.attention.kernels.kernel import Kernel


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    q_BSND, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (q, k, v))
    out_BSND, lse_BNS, *_ = _flash_attn_fwd(
        q_BSND, k_BTKD, v_BTKD, softmax_scale=scale, causal=causal, return_lse=True
    )
    return out_BSND.transpose(1, 2), lse_BNS


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    q_BSND, k_BTKD, v_BTKD, out_BSND, dout_BSND = (x.transpose(1, 2) for x in (q, k, v, out, dout))
    dq, dk, dv = _flash_attn_bwd(
        q_BSND, k_BTKD, v_BTKD, out=out_BSND, dout=dout_BSND, lse=lse, softmax_scale=scale, causal=causal,
        deterministic=False,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


KERNEL = Kernel("flash_attn_4", _forward, _backward, native_gqa=("cuda",), module="flash_attn.cute.interface")
