"""Messages of parameters and gradients that one rank sends in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.config import DTYPE_BYTES, RunConfig
from bench.cost.memory import parameters
from bench.strategies.schedule import Exchange

FLOAT32_BYTES = 4


def model_state_exchanges(cell: RunConfig) -> list[Exchange]:
    """Those of one step, each kind of message as if it were one: large models send large messages."""
    return OF_ENGINE[cell.engine](cell) if cell.cluster.world_size > 1 else []


def _zero3(cell: RunConfig) -> list[Exchange]:
    """Weights gathered for forward and for backward, gradients reduced, in every micro-step
    (arXiv:1910.02054, section 7.2.2).
    """
    ranks = cell.cluster.world_size
    sent = parameters(cell.model) * DTYPE_BYTES[cell.dtype] * (ranks - 1) // ranks
    gathered, reduced = (Exchange(kind, sent, ranks) for kind in ("all_gather", "reduce_scatter"))
    return [gathered, gathered, reduced] * cell.grad_accum


def _fsdp2(cell: RunConfig) -> list[Exchange]:
    """The same within a replica; gradients in float32, in the last micro-step, then among replicas."""
    ranks, count, e = (
        cell.cluster.world_size // cell.dp_replicate,
        parameters(cell.model),
        DTYPE_BYTES[cell.dtype],
    )
    gathered = Exchange("all_gather", count * e * (ranks - 1) // ranks, ranks)
    wide = max(FLOAT32_BYTES, e)
    reduced = Exchange("reduce_scatter", count * wide * (ranks - 1) // ranks, ranks)
    exchanges = [gathered, gathered] * cell.grad_accum + [reduced]
    if cell.dp_replicate > 1:
        sent = 2 * (count // ranks) * wide * (cell.dp_replicate - 1) // cell.dp_replicate
        exchanges.append(Exchange("all_reduce", sent, cell.dp_replicate, stride=ranks))
    return exchanges


def _ddp(cell: RunConfig) -> list[Exchange]:
    """All gradients, all-reduced in the last micro-step."""
    ranks, wide = cell.cluster.world_size, max(FLOAT32_BYTES, DTYPE_BYTES[cell.dtype])
    return [Exchange("all_reduce", 2 * parameters(cell.model) * wide * (ranks - 1) // ranks, ranks)]


OF_ENGINE: Mapping[str, Callable[[RunConfig], list[Exchange]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero3": _zero3,
}
