"""How evenly strategies share out blocks, and that DistFlashAttn's rounds compute each of them once."""

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
from bench.strategies import STRATEGIES, runnable
from bench.strategies.distflash_attn.facts import Lent, rounds
from tests.support.cells import make_cell

LAYOUTS = {"distflash_attn": "contiguous", "ring": "zigzag"}
UNITS = {"distflash_attn": (2.5, 2.9), "ring": (2, 2.4)}
"""What blocks alone take on four ranks, and the most that all may: less than half a block more, the least
that a schedule can waste. Of a contiguous ring they take P - 1/2."""
UNIT_S = 0.3
"""Of a whole block, all queries of a shard on all keys of another; one on its own keys takes half as long."""
TRIES = 2
SHARD_LEN = 8


def units_of(launcher, folder, layouts, ranks):
    """Of each strategy in its layout, what forward and backward take in units, at best."""
    cell = make_cell(f"cluster.world_size={ranks}", f"seq_len={SHARD_LEN * ranks}", "strategy=ring")
    (folder / "layouts.json").write_text(json.dumps(layouts))
    ends = launcher.run(cell, folder, entry=sleep_through_blocks)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    return {strategy: best([end.report[strategy] for end in ends]) for strategy in layouts}


def best(by_rank):
    """Units of each direction, which takes as long as its slowest rank, in the faster of its tries."""
    seconds = torch.tensor(by_rank)  # by rank, try and direction
    return (seconds.amax(dim=0).amin(dim=0) / UNIT_S).tolist()


def sleep_through_blocks(job, log):
    """A rank's whole life: by strategy, the seconds of each try's forward and backward."""
    device, found = join(job), {}
    for name, layout in json.loads((job.folder / "layouts.json").read_text()).items():
        with log.during(name):
            cell = replace(job.cell, strategy=name, layout=layout)
            strategy = runnable(name)(cell, make_groups(cell), STRATEGIES[name])
            seconds_of_a_call(strategy, unit_s=0.0)  # ranks meet
            found[name] = [seconds_of_a_call(strategy, UNIT_S) for _ in range(TRIES)]
    finish_together(device)
    return found


def seconds_of_a_call(strategy, unit_s):
    """This rank's, forward and backward, each from when all ranks begin."""
    model = strategy.cell.model
    shapes = [(1, heads, SHARD_LEN, model.head_dim) for heads in (model.num_heads, *[model.num_kv_heads] * 2)]
    leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
    strategy.kernel = sleeping(unit_s)
    out, forward_s = timed(lambda: strategy.attention(*leaves))
    return forward_s, timed(lambda: out.sum().backward())[1]


def timed(act):
    """What it returns, and seconds from when all ranks begin it."""
    dist.barrier()
    start = time.perf_counter()
    return act(), time.perf_counter() - start


def sleeping(unit_s):
    """A kernel that sleeps; what it returns has the right shapes."""

    def sleep(q, k, causal):
        time.sleep(unit_s * q.shape[2] * k.shape[2] / SHARD_LEN**2 / (2 if causal else 1))

    def forward(q, k, v, causal, scale):
        sleep(q, k, causal)
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(dout, q, k, v, out, lse, causal, scale):
        sleep(q, k, causal)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    return Kernel("sleeping", forward, backward)


def test_blocks_that_sleep_take_half_the_ranks_and_in_distflash_half_a_block_more(launcher, tmp_path):
    found = units_of(launcher, tmp_path, LAYOUTS, 4)
    for strategy, (least, most) in UNITS.items():
        assert all(least <= units <= most for units in found[strategy]), found


def blocks_of(rank, ranks, *, causal):
    """(Whose queries, whose keys) of each block that a rank computes beside its own."""
    for each in rounds(rank, ranks, causal=causal):
        if each.takes is not None:
            yield (rank, each.previous) if each.takes is Lent.KEYS else (each.previous, rank)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_block_below_the_diagonal_is_computed_once_and_evenly(ranks, causal):
    by_rank = [[*blocks_of(rank, ranks, causal=causal)] for rank in range(ranks)]
    pairs = itertools.permutations(range(ranks), 2)
    assert sorted(itertools.chain(*by_rank)) == sorted((q, k) for q, k in pairs if k < q or not causal)
    counts = {len(blocks) for blocks in by_rank}
    assert counts == ({ranks // 2, (ranks - 1) // 2} if causal else {ranks - 1})
