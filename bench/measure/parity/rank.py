"""The parity pass on a rank: it compares a strategy's attention with float64 before any timing.

It runs at up to 512 tokens with the cell's own ranks, heads, layout, kernel and dtype. Inputs are rounded
to the dtype first, so that only the computation is compared. Limits follow the error of plain attention on
one device in the same dtype, as in the tests of flash-attention.

Shapes: B sequences, T tokens of a sequence, S tokens of this rank's shard, D head size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bench.config import Cell
from bench.measure.parity.divergence import first_divergence
from bench.measure.parity.exact import Tensors, plain_attention, relative_error
from bench.measure.parity.section import MAX_TOKENS, ParitySection, parity_limit
from bench.measure.rank_pass import RankPass
from bench.ranks.log import RankStage, WrongResultError
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import Strategy
from bench.training.models import TORCH_DTYPES
from bench.training.packing import random_documents

SEED = 7


def check_attention(
    strategy: Strategy, device: torch.device, *, causal: bool = True
) -> tuple[ParitySection, str | None]:
    """Compare the strategy's attention, forward and backward, with float64; every rank must call it.

    Returns:
        Errors with their limits, and a description of the first error beyond its limit, None without one.
    """
    cell = strategy.cell
    seq_len = parity_len(strategy)
    inputs = random_inputs(cell, seq_len, device)
    documents = random_documents(cell.batch, seq_len) if cell.data.packs else None
    exact = plain_attention(tuple(x.double() for x in inputs), causal=causal, documents=documents)
    plain = plain_attention(inputs, causal=causal, documents=documents)
    with strategy.use_documents(documents):
        results = _run_attention(strategy, inputs, causal=causal)
    limits = {
        name: parity_limit(name, cell.dtype, relative_error(plain[name], exact[name])) for name in results
    }
    errors = {name: relative_error(results[name], exact[name]) for name in results}
    divergence = first_divergence(
        strategy, inputs, results, exact, limits, causal=causal, documents=documents
    )
    return ParitySection(tokens=seq_len, errors=errors, limits=limits), divergence


def parity_len(strategy: Strategy) -> int:
    """Return the largest length that the layout can split, at most 512 tokens and the cell's length.

    If none is that short, return the smallest length that the layout can split.
    """
    multiple = strategy.facts.length_multiple(strategy.cell)
    return max(multiple, min(MAX_TOKENS, strategy.cell.seq_len) // multiple * multiple)


def random_inputs(cell: Cell, seq_len: int, device: torch.device) -> Tensors:
    """Return random q, k, v and gradient of the output, [B, heads, T, D], equal on all ranks."""
    return tuple(random_input(cell, index, seq_len, device) for index in range(4))


def random_input(cell: Cell, index: int, seq_len: int, device: torch.device) -> Tensor:
    """Return one tensor of `random_inputs`: `index` 0 is q, 1 is k, 2 is v, 3 is the output's gradient."""
    model = cell.model
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)[index]
    generator = torch.Generator(device).manual_seed(SEED + index)
    shape = (cell.batch, heads, seq_len, model.head_dim)
    return torch.randn(shape, generator=generator, dtype=TORCH_DTYPES[cell.dtype], device=device)


def _run_attention(strategy: Strategy, inputs: Tensors, *, causal: bool) -> dict[str, Tensor]:
    """Run attention on this rank's shard; return `out`, `dq`, `dk`, `dv` of whole sequences in token order.

    `lse` is included if the strategy exposes it. Every rank must call it.
    """
    pieces = strategy.slices(inputs[0].shape[2])
    q, k, v, dout = (torch.cat([x[:, :, piece] for piece in pieces], dim=2) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = strategy.attention(*leaves, causal=causal)
    out.backward(dout)
    with torch.no_grad():
        lse_BNS = strategy.log_sum_exp(q, k, v, causal=causal)
    shards = {
        "out": out.detach(),
        "lse": None if lse_BNS is None else lse_BNS[..., None],
        **{f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)},
    }
    return {
        name: gather_sequence(strategy, shard.transpose(1, 2)).transpose(1, 2)
        for name, shard in shards.items()
        if shard is not None
    }


def gather_sequence(strategy: Strategy, shard_BS: Tensor) -> Tensor:
    """Return the whole sequence in token order, [B, T, ...], from all ranks' shards, [B, S, ...].

    Every rank that shares the sequence must call it.
    """
    local = shard_BS.contiguous()
    shards = [torch.empty_like(local) for _ in range(strategy.cell.sp_degree)]
    dist.all_gather(shards, local, group=strategy.groups.sequence)
    return strategy.unshard(shards)


class ParityPass(RankPass):
    section: ParitySection | None = None

    def before_steps(self) -> None:
        """Compare attention with float64; raise WrongResultError if a tensor is beyond its limit."""
        subject, log = self.measurement.subject, self.measurement.log
        if subject.strategy is None:
            return
        with log.run_phase("parity"), without_memory_limit():
            log.report(RankStage("parity", "attention"))
            self.section, divergence = check_attention(
                subject.strategy, subject.device, causal=subject.causal
            )
            if divergence is not None:
                raise WrongResultError(f"attention parity: {divergence}")

    def part(self) -> ParitySection | None:
        return self.section


PASS = ParityPass
