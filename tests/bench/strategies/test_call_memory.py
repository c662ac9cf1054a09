"""Memory of one call of attention is that of the strategy's `call_memory`."""

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
from tests.support.many_cells import built_workloads, results_of_cells

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
"""Dtype, heads and number of rounds of the cases, by strategy."""
RELEASE_S = 0.1
"""Seconds after which gloo's threads have freed their tensors, which would count in the next phase."""
TOLERANCES = {"ulysses_chunked": (0.0, 0.0), "gather_kv": (0.05, 0.15)}
"""Relative tolerances of forward and backward; gloo decides how long it holds its copy of gradients."""


def cell_of(strategy, layout, options, dtype, heads, chunks):
    words = (f"strategy={strategy}", f"layout={layout}", f"dtype={dtype}", f"seq_len={SEQ_LEN}")
    cell = make_cell(*words, "workload=attention", f"cluster.world_size={RANKS}", "model=qwen3_nano")
    num_heads, num_kv_heads = HEADS[heads]
    model = replace(cell.model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64)
    chosen = tuple((key, chunks if key == "chunks" else value) for key, value in options)
    return replace(cell, model=model, options=chosen)


def watch_calls(job, log):
    """Run a rank: call attention of every cell once, and record the bytes of a second call."""
    measured = {}
    torch_flash.cpu_arithmetic = lambda dtype: dtype  # the facts do not count a kernel's float32 copies
    for name, workload in built_workloads(job, log):
        strategy, device = workload.rank.strategy, workload.rank.device
        pieces = strategy.slices(SEQ_LEN)
        q, k, v, dout = (
            torch.cat(
                [random_input(strategy.cell, index, SEQ_LEN, device)[:, :, piece] for piece in pieces], dim=2
            )
            for index in range(4)
        )
        first, leaves = ([x.detach().requires_grad_() for x in (q, k, v)] for _ in range(2))
        strategy.attention(*first).backward(dout)
        del first
        time.sleep(RELEASE_S)
        phase = StepPhase()
        with AllocationTracker(phase) as tracker:
            phase.enter("forward")
            out = strategy.attention(*leaves)
            time.sleep(RELEASE_S)
            phase.enter("backward")
            out.backward(dout)
            phase.enter(None)
        del out, leaves
        measured[name] = tracker.phases.peak_bytes | {"saved": tracker.phases.saved_bytes["forward"]}
    return {"results": measured}


CASES = {
    " ".join((name, layout, *(value for _, value in options), dtype, heads, f"in {chunks or 1}")): (
        name, layout, options, dtype, heads, chunks
    )
    for name, cases in CASES_OF.items()
    for layout, options in variants(STRATEGIES[name])
    for dtype, heads, chunks in cases
}  # fmt: skip


@pytest.fixture(scope="module")
def measured_bytes(launcher, tmp_path_factory):
    """Bytes of every case by phase, on the rank that allocates most."""
    cells = {name: cell_of(*case) for name, case in CASES.items()}
    seen = results_of_cells(launcher, tmp_path_factory.mktemp("calls"), cells, watch_calls)
    return {
        name: {phase: max(rank[phase] for rank in by_rank) for phase in ("forward", "saved", "backward")}
        for name, by_rank in seen.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_call_memory_matches_measured_bytes(measured_bytes, case):
    cell = cell_of(*CASES[case])
    expected, measured = STRATEGIES[cell.strategy].call_memory(cell), measured_bytes[case]
    forward, backward = TOLERANCES[cell.strategy]
    assert measured["forward"] == pytest.approx(expected.forward, rel=forward)
    assert measured["saved"] == pytest.approx(expected.saved, rel=forward)
    assert measured["backward"] == pytest.approx(expected.backward, rel=backward)
