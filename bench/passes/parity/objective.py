"""Does the cell train the objective? Loss and gradients of the cut model against float64, and why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bench.passes.parity.attention import ParityOutcome, parity_len
from bench.passes.parity.cut_model import CutStep, Share, Signal, cut_step
from bench.passes.parity.limits import gradient_limit, loss_limit
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy
from bench.training.data import count_valid
from bench.training.trainers.trainer import Trainer


def check_objective(trainer: Trainer, device: torch.device) -> ParityOutcome:
    """Run one step of the cut model and compare; every rank must call it."""
    strategy = trainer.strategy
    dtype, seq_len = strategy.cell.dtype, parity_len(strategy)
    with cut_step(trainer, seq_len, device) as step:
        exact = step.exact()
        errors = exact.errors_of(step.found)
        plain = exact.errors_of(step.plain(device, dtype))
        limits = {
            "loss": loss_limit(dtype, plain["loss"]),
            "gradients": gradient_limit(dtype, plain["gradients"]),
        }
        divergence = _divergence(strategy, step, exact, errors, limits)
    return ParityOutcome(seq_len, errors, limits, divergence)


def _divergence(
    strategy: Strategy, step: CutStep, exact: Signal, errors: dict[str, float], limits: dict[str, float]
) -> str | None:
    for name, limit in limits.items():
        if not errors[name] <= limit:
            cause = _recognised(strategy, step, exact, limits["gradients"])
            said = f"{name} of a two-layer cut off by {errors[name]:.1e} (limit {limit:.1e})"
            return f"{said}; {cause or 'no known cause fits'}"
    return None


def _recognised(strategy: Strategy, step: CutStep, exact: Signal, limit: float) -> str | None:
    """The mistake whose float64 signal is the one found, to the tolerance of the comparison."""
    degree = strategy.cell.sp_degree
    for factor, said in ((degree, "sp_degree"), (1 / degree, "1/sp_degree")):
        scaled = Signal(exact.loss, exact.gradients * factor)
        if degree > 1 and _explains(scaled, step.found, limit):
            return f"gradients are exactly {said} = {factor:g} times too large"
    for said, shares in _mistakes(strategy, step):
        if _explains(step.signal_of(shares), step.found, limit):
            return said
    return None if step.saw_the_step else "the ranks saw other tokens than the step holds"


def _explains(wrong: Signal, found: Signal, limit: float) -> bool:
    """By gradients: the loss is reported from sums that some of these mistakes never touch."""
    return wrong.errors_of(found)["gradients"] <= limit


def _mistakes(strategy: Strategy, step: CutStep) -> Iterator[tuple[str, list[Share]]]:
    yield (
        "losses are averaged over ranks without weighting them by their token counts",
        _mean_of_ranks(strategy, step),
    )
    moved = [
        replace(share, batch=_contiguous_positions(strategy, share.batch))
        for share in step.mean_over_tokens()
    ]
    yield f"positions are contiguous in {strategy.cell.layout} layout", moved
    cut = [replace(batch, labels=_labels_cut(strategy, batch)) for batch in step.sequences]
    yield "labels are shifted after sharding: the last token of each piece has no label", _mean_of(cut)
    if strategy.cell.data.packs:
        crossing = [replace(batch, labels=_labels_across(batch)) for batch in step.sequences]
        yield "a document's last token has the next document's first one as its label", _mean_of(crossing)


def _mean_of(sequences: Sequence[Batch]) -> list[Share]:
    """Every valid token weighs the same."""
    valid = sum(int(count_valid(batch.labels)) for batch in sequences)
    return [Share(batch, 1 / valid) for batch in sequences]


def _labels_across(batch: Batch) -> torch.Tensor:
    """Labels of which only those at the sequence's start do not count."""
    own = batch.input_ids.roll(-1, dims=1)
    counted = (batch.labels != IGNORED_LABEL).long().cummax(dim=1).values.bool()
    labels = torch.where(counted, own, IGNORED_LABEL)
    labels[:, -1] = batch.labels[:, -1]
    return labels


def _mean_of_ranks(strategy: Strategy, step: CutStep) -> list[Share]:
    """Each rank's own mean over its valid tokens, then the mean over ranks and micro-steps."""
    shares = []
    ranks = range(strategy.cell.sp_degree)
    for batch in step.sequences:
        for rank in ranks:
            labels = torch.full_like(batch.labels, IGNORED_LABEL)
            for piece in strategy.facts.slices(strategy.cell, labels.shape[1], rank):
                labels[:, piece] = batch.labels[:, piece]
            weight = 1 / (len(ranks) * len(step.sequences) * max(1, int(count_valid(labels))))
            shares.append(Share(replace(batch, labels=labels), weight))
    return shares


def _contiguous_positions(strategy: Strategy, batch: Batch) -> Batch:
    """Rank r's tokens numbered from r x shard, whatever its layout."""
    position_ids, start = batch.position_ids.clone(), 0
    for rank in range(strategy.cell.sp_degree):
        for piece in strategy.facts.slices(strategy.cell, position_ids.shape[1], rank):
            size = position_ids[:, piece].shape[1]
            position_ids[:, piece] = torch.arange(start, start + size, device=position_ids.device)
            start += size
    return replace(batch, position_ids=position_ids)


def _labels_cut(strategy: Strategy, batch: Batch) -> torch.Tensor:
    labels = batch.labels.clone()
    for rank in range(strategy.cell.sp_degree):
        for piece in strategy.facts.slices(strategy.cell, labels.shape[1], rank):
            last = range(labels.shape[1])[piece][-1]
            labels[:, last] = IGNORED_LABEL
    return labels
