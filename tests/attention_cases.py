"""Attention of sharded sequences against float64 on one device, many cases in one set of ranks."""

import json

import torch
import torch.distributed as dist

from bench.config import RunConfig
from bench.process_groups import make_groups
from bench.strategies import STRATEGIES, runnable
from bench.training.models import TORCH_DTYPES

BATCH = 2


def check_attention(job, log):
    """A rank's whole life: every case of the folder's `cases.json`, worst errors to `errors.json`."""
    from bench.worker import _join

    _join(job)
    errors = {}
    for name, (fields, causal) in json.loads((job.folder / "cases.json").read_text()).items():
        with log.during(name):
            errors[name] = case_errors(RunConfig.from_json(fields), causal=causal)
    if job.rank == 0:
        (job.folder / "errors.json").write_text(json.dumps(errors))
    return {}


def case_errors(cell, *, causal):
    """Worst error of out, dq, dk and dv, relative to the exact tensor's maximum."""
    strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
    wholes = random_inputs(cell)
    exact = plain_attention([x.double() for x in wholes], causal)
    pieces = strategy.slices(cell.seq_len)
    q, k, v, dout = (torch.cat([x[:, :, piece] for piece in pieces], dim=2) for x in wholes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = strategy.attention(*inputs, causal=causal)
    out.backward(dout)
    return {
        name: relative_error(gathered(strategy, found), whole)
        for name, found, whole in zip(
            ("out", "dq", "dk", "dv"), (out, *(x.grad for x in inputs)), exact, strict=True
        )
    }


def random_inputs(cell):
    """q, k, v and the gradient of the output, whole, the same on every rank."""
    model, dtype = cell.model, TORCH_DTYPES[cell.dtype]
    make = torch.Generator().manual_seed(7)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    shapes = [(BATCH, n, cell.seq_len, model.head_dim) for n in heads]
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def plain_attention(inputs, causal):
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    out.backward(inputs[3])
    return out.detach(), q.grad, k.grad, v.grad


def gathered(strategy, shard):
    """The whole tensor in token order, from the shards of the sequence group."""
    shards = [torch.empty_like(shard) for _ in range(strategy.cell.sp_degree)]
    dist.all_gather(shards, shard.detach().contiguous(), group=strategy.groups.sequence)
    return strategy.unshard([x.transpose(1, 2) for x in shards]).transpose(1, 2)


def relative_error(found, exact):
    error = (found.double() - exact).abs().max() / exact.abs().max()
    return float(error) if bool(torch.isfinite(found).all()) else float("inf")
