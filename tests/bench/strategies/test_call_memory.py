"""What one call of attention takes is what its strategy's facts say."""

import time
from dataclasses import replace

import pytest
import torch

from bench.attention.kernels import torch_flash
from bench.measure.memory.trackers import AllocationTracker
from bench.measure.parity.rank import random_input
from bench.ranks.log import StepPhase
from bench.strategies import STRATEGIES
from tests.support.cells import make_cell, variants
from tests.support.many_cells import built, seen_inside

pytestmark = pytest.mark.ranks
RANKS, SEQ_LEN = 2, 512
HEADS = {"16/16 heads": (16, 16), "16/8 heads": (16, 8), "16/2 heads": (16, 2)}
CASES_OF = {
    "gather_kv": (("bf16", "16/16 heads", None), ("fp32", "16/8 heads", None)),
    "ulysses_chunked": (
        ("bf16", "16/16 heads", "8"),
        ("fp32", "16/8 heads", "4"),
        ("bf16", "16/2 heads", "1"),
        ("bf16", "16/2 heads", "8"),
        ("fp32", "16/2 heads", "2"),
        ("fp64", "16/2 heads", "8"),
    ),
}
"""By strategy: dtype, heads and in how many rounds they are exchanged."""
LETTING_GO_S = 0.1
"""After which gloo's threads hold nothing of what was: it would count as there when the next begins."""
NEAR = {"ulysses_chunked": (0.0, 0.0), "gather_kv": (0.05, 0.15)}
"""In forward and backward: how long gloo holds its copy of what it reduces is not ours to say."""


def cell_of(strategy, layout, options, dtype, heads, chunks):
    words = (f"strategy={strategy}", f"layout={layout}", f"dtype={dtype}", f"seq_len={SEQ_LEN}")
    cell = make_cell(*words, "workload=attention", f"cluster.world_size={RANKS}", "model=qwen3_nano")
    num_heads, num_kv_heads = HEADS[heads]
    model = replace(cell.model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64)
    chosen = tuple((key, chunks if key == "chunks" else value) for key, value in options)
    return replace(cell, model=model, options=chosen)


def watch_calls(job, log):
    """A rank's whole life: of each cell a first call, and the bytes that a second takes."""
    found = {}
    torch_flash.cpu_arithmetic = lambda dtype: dtype  # a kernel's float32 copies are no part of the facts
    for name, workload in built(job, log):
        strategy, device = workload.rank.strategy, workload.rank.device
        pieces = strategy.slices(SEQ_LEN)
        q, k, v, dout = (
            torch.cat(
                [random_input(strategy.cell, which, SEQ_LEN, device)[:, :, piece] for piece in pieces], dim=2
            )
            for which in range(4)
        )
        first, leaves = ([x.detach().requires_grad_() for x in (q, k, v)] for _ in range(2))
        strategy.attention(*first).backward(dout)
        del first
        time.sleep(LETTING_GO_S)
        phase = StepPhase()
        with AllocationTracker(phase) as tracker:
            phase.enter("forward")
            out = strategy.attention(*leaves)
            time.sleep(LETTING_GO_S)
            phase.enter("backward")
            out.backward(dout)
            phase.enter(None)
        del out, leaves
        found[name] = tracker.phases.taken | {"kept": tracker.phases.kept["forward"]}
    return {"seen": found}


CASES = {
    " ".join((name, layout, *(value for _, value in options), dtype, heads, f"in {chunks or 1}")): (
        name, layout, options, dtype, heads, chunks
    )
    for name, cases in CASES_OF.items()
    for layout, options in variants(STRATEGIES[name])
    for dtype, heads, chunks in cases
}  # fmt: skip


@pytest.fixture(scope="module")
def taken(launcher, tmp_path_factory):
    """By cell what its call takes in forward and backward, on the rank that takes most."""
    cells = {name: cell_of(*case) for name, case in CASES.items()}
    seen = seen_inside(launcher, tmp_path_factory.mktemp("calls"), cells, watch_calls)
    return {
        name: {phase: max(rank[phase] for rank in by_rank) for phase in ("forward", "kept", "backward")}
        for name, by_rank in seen.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_a_call_takes_what_its_facts_say(taken, case):
    cell = cell_of(*CASES[case])
    said = STRATEGIES[cell.strategy].call_memory(cell)
    near_forward, near_backward = NEAR[cell.strategy]
    assert taken[case]["forward"] == pytest.approx(said.forward, rel=near_forward)
    assert taken[case]["kept"] == pytest.approx(said.kept, rel=near_forward)
    assert taken[case]["backward"] == pytest.approx(said.backward, rel=near_backward)
