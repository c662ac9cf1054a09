"""What published numbers can bear: sentences whose numbers come from the claims and the cost model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from analysis.labels import number_label, percent_label
from analysis.published.model import CostModel
from analysis.published.registry import Claim, Registry
from analysis.published.setup import NODE, setup_of
from bench.cost.flops import model_flops
from bench.labels import GIB

POST = "hf-ulysses-"
SP4_64K, SP1_8K = f"{POST}revB-tput-sp4-64k", f"{POST}revB-tput-sp1-8k"
LINE = (f"{POST}mem-sp4-8k", f"{POST}mem-sp4-96k")
WIDE_COPIES = 3
"""Of the logits in float32: log-softmax, its gradient and theirs (bench/cost/memory.py)."""
FLOAT32_BYTES = 4
SHARES = ("a2a_share", "communication_share")


def bearings(registry: Registry, model: CostModel, groups: Collection[str]) -> list[str]:
    """The sentences about the claims of these groups."""
    claims = {claim.id: claim for claim in registry.claims}
    return [
        sentence(claims, registry, model)
        for group, sentences in SENTENCES.items()
        if group in groups
        for sentence in sentences
    ]


Claims = Mapping[str, Claim]


def whole_job(claims: Claims, registry: Registry, model: CostModel) -> str:
    """Whether a throughput is that of all GPUs: as one GPU's it would be beyond the peak."""
    claim = claims[SP4_64K]
    share, ranks = _share_of_peak(claim, registry, model)
    together, alone = percent_label(share), percent_label(share * ranks)
    return (
        f"{number_label(claim.value)} tokens/s at 64k is the total of {ranks} GPUs: as such it takes"
        f" {together} of their peak, per GPU it would take {alone}."
    )


def fixed_cost(claims: Claims, registry: Registry, model: CostModel) -> str:
    """What is behind a ratio of two lengths on two numbers of GPUs."""
    long, base = claims[SP4_64K], claims[SP1_8K]
    ratio = float(long.value) / float(base.value)
    share, ranks = _share_of_peak(long, registry, model)
    of_base, _ = _share_of_peak(base, registry, model)
    return (
        f"{ratio:.1f}x compares {ranks} GPUs at 64k with one at 8k; per GPU it is {ratio / ranks:.2f}x."
        f" The base reaches {percent_label(of_base)} of its peak and 64k {percent_label(share)}: what a step"
        " costs beside computing weighs on 8k tokens, and the ratio is how far a long sequence hides it."
    )


def _share_of_peak(claim: Claim, registry: Registry, model: CostModel) -> tuple[float, int]:
    """MFU of a throughput as that of the whole job, and the number of its GPUs."""
    settings = setup_of(claim, registry).settings
    cell = model.cell(settings)
    flops_per_s = model_flops(cell, causal=True) / cell.tokens_per_step * float(claim.value)
    ranks = cell.cluster.world_size
    return flops_per_s / model.peak_flops_per_s(settings) / ranks, ranks


def logits(claims: Claims, registry: Registry, model: CostModel) -> str:
    """What is behind the slope of a memory line: bytes per token of a rank."""
    short, long = (claims[name] for name in LINE)
    cell = model.cell(setup_of(long, registry).settings)
    assert long.seq_len is not None
    assert short.seq_len is not None
    tokens = (long.seq_len - short.seq_len) / cell.sp_degree
    slope = (float(long.value) - float(short.value)) * GIB / tokens
    logits_bytes = WIDE_COPIES * FLOAT32_BYTES * cell.model.vocab_size
    grows, copies = (number_label(size / 1e6) for size in (slope, logits_bytes))
    return (
        f"From 8k to 96k memory grows by {grows} MB a token of a rank; three float32 copies of its logits"
        f" are {copies} MB, {percent_label(logits_bytes / slope)} of it:"
        " a chunked loss takes the line away, whatever the strategy."
    )


def topology(claims: Claims, registry: Registry, model: CostModel) -> str:  # noqa: ARG001
    """What joins the GPUs behind each share of communication that is claimed for Ulysses."""
    shares = [claim for claim in claims.values() if claim.metric in SHARES and claim.system == "ulysses"]
    inside = [float(claim.value) for claim in shares if _gpus(claim) <= NODE]
    across = [float(claim.value) for claim in shares if _gpus(claim) > NODE]
    apart = f"{min(across):.0f} to {max(across):.0f} %"
    return (
        f"Ulysses spends {min(inside):.0f} % of the time on communication within a node (prefill, 8 GPUs) and"
        f" {apart} across nodes: a share without its topology says nothing."
    )


def _gpus(claim: Claim) -> int:
    count = claim.hardware.count
    return count if isinstance(count, int) else 0


Sentence = Callable[[Claims, Registry, CostModel], str]

SENTENCES: Mapping[str, Sequence[Sentence]] = {
    "hf-blog-benchmark": (whole_job, fixed_cost, logits),
    "comm-shares": (topology,),
}
"""By the group of the claims that they are about."""
