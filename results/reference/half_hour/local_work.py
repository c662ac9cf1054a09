"""Time the attention that each strategy leaves one of P ranks to compute, on one device.

    python results/reference/half_hour/local_work.py OUT.jsonl KERNELS LENGTHS RANKS [WORD ...]

Runs the kernel calls of each strategy's schedule, on the rank with most to do, and compares them with a P-th
of the whole attention on this device: 100 % is ideal. Nothing is sent; merges and messages come on top.
"""

import json
import statistics
import sys
from collections import Counter
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.attention.kernels import KERNELS, kernel_backward, kernel_forward
from bench.common.environment import this_machine
from bench.config import Cell
from bench.measure.timing.clock import StepClock
from bench.request.composition import compose_words
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.schedule import Block, whole_block

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
STRATEGY_WORDS = (
    "strategy=ulysses", "strategy=ring", "strategy=ring layout=contiguous", "strategy=ring layout=striped",
    "strategy=usp ulysses_degree=2", "strategy=gather_kv", "strategy=distflash_attn",
    "strategy=ring_flash_attn_llama3",
)  # fmt: skip
"""Schedules that differ: ring_flash_attn's and torch_cp's are those of `ring`."""
WORDS = ("model=qwen3_4b", "engine=ddp", "mode=predict", "hardware=h100_80gb")
"""Shapes follow from the words alone; no prediction is read."""
WARM_UP, CALLS = 2, 5


def main() -> None:
    """Append one JSON line for each kernel, length, number of ranks and strategy."""
    output, *lists = sys.argv[1:5]
    with Path(output).open("a") as file:
        for kernel, length, ranks, words in product(*(each.split(",") for each in lists), STRATEGY_WORDS):
            axes = f"kernel={kernel} seq_len={length} cluster.world_size={ranks} sp_degree={ranks} {words}"
            line: dict[str, Any] = {"words": axes}
            try:
                cell = resolve(compose_words(*WORDS, *axes.split(), *sys.argv[5:]), this_machine())
                line |= {"error": reason} if (reason := refusal(cell)) else shares(cell)
            except Exception as error:  # noqa: BLE001  one shape must not end the others
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(line), file=file, flush=True)


def shares(cell: Cell) -> dict[str, Any]:
    """Return milliseconds of one rank's kernel calls, and the ideal of them in percent."""
    model, schedule = cell.model, STRATEGIES[cell.strategy].schedule(cell)
    assert schedule is not None
    whole_ms = call_ms(cell.kernel, whole_block(cell, model.num_heads, model.num_kv_heads), model.head_dim)
    found: dict[str, Any] = {}
    for n, name in enumerate(("forward", "backward")):
        calls = Counter(block for stage in getattr(schedule, name) for block in stage.blocks)
        ms = sum(count * call_ms(cell.kernel, block, model.head_dim)[n] for block, count in calls.items())
        found |= {f"{name}_ms": ms, f"{name}_calls": calls.total(), f"{name}_whole_ms": whole_ms[n]}
        found[f"{name}_percent_of_ideal"] = 100 * whole_ms[n] / cell.sp_degree / ms
    return found


@cache
def call_ms(kernel: str, block: Block, head_dim: int) -> tuple[float, float]:
    """Return the milliseconds of one kernel call on random numbers, forward and backward."""
    q, k, v = (
        torch.randn(block.sequences, heads, rows, head_dim, device=DEVICE, dtype=torch.bfloat16)
        for heads, rows in ((block.heads, block.queries), *2 * [(block.kv_heads, block.keys)])
    )
    mask = {"causal": block.is_causal, "scale": head_dim**-0.5}
    forward = partial(kernel_forward, KERNELS[kernel], q, k, v, **mask)
    out, lse = forward()
    backward = partial(kernel_backward, KERNELS[kernel], torch.randn_like(out), q, k, v, out, lse, **mask)
    return median_ms(forward), median_ms(backward)


def median_ms(call: partial[Any]) -> float:
    """Return the median of several calls, back to back."""
    clock = StepClock(DEVICE)
    clock.mark()
    for _ in range(WARM_UP + CALLS):
        call()
        clock.mark()
    return statistics.median(clock.step_times_ms()[WARM_UP:])


if __name__ == "__main__":
    main()
