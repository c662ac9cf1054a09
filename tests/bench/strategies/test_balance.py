"""Balance of blocks over ranks, and coverage of all blocks by DistFlashAttn's rounds."""

import itertools
import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bench.attention.kernels import Kernel
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class
from bench.strategies.distflash_attn.facts import Operand, rounds
from tests.support.cells import make_cell

LAYOUTS = {"distflash_attn": "contiguous", "ring": "zigzag"}
UNITS = {"distflash_attn": (2.5, 2.9), "ring": (2, 2.4)}
"""Units that blocks alone take on four ranks, and the largest number that passes.

A schedule wastes at least half a block if it wastes any, so less than that is allowed. A contiguous ring
takes P - 1/2 units.
"""
UNIT_S = 0.3
"""Seconds of a unit, a block of all queries of a shard and all keys of another; a triangle takes half."""
TRIES = 2
SHARD_LEN = 8


def units_of(launcher, folder, layouts, ranks):
    """Return the shortest times of forward and backward in units, by strategy."""
    cell = make_cell(f"cluster.world_size={ranks}", f"seq_len={SHARD_LEN * ranks}", "strategy=ring")
    (folder / "layouts.json").write_text(json.dumps(layouts))
    ends = launcher.run(cell, folder, entry=sleep_through_blocks)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    return {strategy: best([end.report[strategy] for end in ends]) for strategy in layouts}


def best(by_rank):
    """Return the units of forward and backward on the slowest rank, in the fastest try."""
    seconds = torch.tensor(by_rank)  # [rank, try, direction]
    return (seconds.amax(dim=0).amin(dim=0) / UNIT_S).tolist()


def sleep_through_blocks(job, log):
    """Run a rank and return the seconds of forward and backward of all tries, by strategy."""
    device, seconds = join(job), {}
    for name, layout in json.loads((job.folder / "layouts.json").read_text()).items():
        with log.run_phase(name):
            cell = replace(job.cell, strategy=name, layout=layout)
            strategy = load_strategy_class(name)(cell, make_groups(cell), STRATEGIES[name])
            seconds_of_a_call(strategy, unit_s=0.0)  # makes ranks connect
            seconds[name] = [seconds_of_a_call(strategy, UNIT_S) for _ in range(TRIES)]
    finish_together(device)
    return seconds


def seconds_of_a_call(strategy, unit_s):
    """Return this rank's seconds of forward and of backward, which all ranks start together."""
    model = strategy.cell.model
    shapes = [(1, heads, SHARD_LEN, model.head_dim) for heads in (model.num_heads, *[model.num_kv_heads] * 2)]
    leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
    strategy.kernel = sleeping(unit_s)
    out, forward_s = timed(lambda: strategy.attention(*leaves))
    return forward_s, timed(lambda: out.sum().backward())[1]


def timed(act):
    """Return the result of `act` and its seconds from the common start of all ranks."""
    dist.barrier()
    start = time.perf_counter()
    return act(), time.perf_counter() - start


def sleeping(unit_s):
    """Return a kernel that sleeps and returns tensors of the right shapes."""

    def sleep(q, k, causal):
        time.sleep(unit_s * q.shape[2] * k.shape[2] / SHARD_LEN**2 / (2 if causal else 1))

    def forward(q, k, v, causal, scale):
        sleep(q, k, causal)
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(dout, q, k, v, out, lse, causal, scale):
        sleep(q, k, causal)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    return Kernel("sleeping", forward, backward)


def test_balanced_rings_take_the_time_of_their_blocks(launcher, tmp_path):
    units_by_strategy = units_of(launcher, tmp_path, LAYOUTS, 4)
    for strategy, (least, most) in UNITS.items():
        assert all(least <= units <= most for units in units_by_strategy[strategy]), units_by_strategy


def blocks_of(rank, ranks, *, causal):
    """Yield (rank of the queries, rank of the keys) of a rank's blocks except the local one."""
    for round_ in rounds(rank, ranks, causal=causal):
        if round_.receives is not None:
            yield (rank, round_.sender) if round_.receives is Operand.KEYS else (round_.sender, rank)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", range(1, 10))
def test_rounds_compute_every_block_once_and_evenly(ranks, causal):
    by_rank = [[*blocks_of(rank, ranks, causal=causal)] for rank in range(ranks)]
    pairs = itertools.permutations(range(ranks), 2)
    assert sorted(itertools.chain(*by_rank)) == sorted((q, k) for q, k in pairs if k < q or not causal)
    counts = {len(blocks) for blocks in by_rank}
    assert counts == ({ranks // 2, (ranks - 1) // 2} if causal else {ranks - 1})
