"""Time the part of a block's backward that the stand-in for flash-attn adds on a CPU rank.

    python -m tests.benchmarks.stand_in

`copied`: all three gradients are copied to the package's buffers; `summed`: those of repeated KV heads are
summed into them, as the stand-in does. Both are shares of the whole backward.
"""

import time
from statistics import median

import torch

from bench.attention.kernels import KERNELS, kernel_forward
from bench.attention.kernels.kernel import _repeat_heads, _sum_groups, write_gradients

KERNEL, ROUNDS = KERNELS["torch_flash"], 15
HEADS_AND_SIZE = ((4, 2, 16), (16, 8, 128))
"""Query heads, KV heads and head size of qwen3_nano and qwen3_0_6b."""


def copied(into, gradients, repeats):
    dq, dk, dv = gradients
    write_gradients(into, (dq, _sum_groups(dk, repeats), _sum_groups(dv, repeats)), 1)


def seconds(function, *arguments):
    start = time.perf_counter()
    return function(*arguments), time.perf_counter() - start


def main():
    torch.set_num_threads(1)
    for heads, kv_heads, size in HEADS_AND_SIZE:
        for tokens in (512, 1024, 4096):
            dout, q, k, v = (
                torch.randn(1, tokens, count, size, dtype=torch.bfloat16).transpose(1, 2)
                for count in (heads, heads, kv_heads, kv_heads)
            )
            out_lse = kernel_forward(KERNEL, q, k, v, causal=False, scale=size**-0.5)
            into, rounds = [torch.empty_like(x) for x in (q, k, v)], []
            for _ in range(ROUNDS):
                repeated = (_repeat_heads(x, heads // kv_heads) for x in (k, v))
                arguments = (dout, q, *repeated, *out_lse, False, size**-0.5)
                gradients, backward_s = seconds(KERNEL.backward, *arguments)
                ways = (write_gradients, copied, write_gradients)  # the first one finds cold caches
                added_s = [seconds(way, into, gradients, heads // kv_heads)[1] for way in ways]
                rounds.append([added / (backward_s + added) for added in added_s])
            _, before, after = (median(shares) for shares in zip(*rounds, strict=True))
            print(f"{heads}/{kv_heads} heads of {size}, {tokens}: copied {before:.1%}, summed {after:.1%}")


if __name__ == "__main__":
    main()
