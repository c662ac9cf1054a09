"""Attention whose blocks sleep in proportion to their area: what a schedule takes if all else is free."""

import json
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from bench.attention.kernels import Kernel
from bench.node.worker import join
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.strategies import STRATEGIES, runnable
from tests.cells import make_cell

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
