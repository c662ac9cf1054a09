"""Can this cell run here at all? The one table of what a trainer, an engine and a strategy do together."""

from __future__ import annotations

from pathlib import Path

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.config import NOT_USED, RunConfig
from bench.request.layer_types import shortest_window, unplain_layers
from bench.request.model_numbers import read_config
from bench.request.modes import mode_of
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import TRAINER_FACTS

ENGINE_DTYPES = {
    "ddp": ("bf16", "fp32", "fp64"),
    "fsdp2": ("bf16", "fp32", "fp64"),
    "zero3": ("bf16", "fp32"),
}

OPTIMIZER_OFFLOAD_ENGINES = ("zero3",)


def refusal(cell: RunConfig) -> str | None:
    """Every reason why the cell is `unsupported`, each with a way out, in one line; None when it is legal."""
    if cell.sp_degree * cell.dp_degree != cell.cluster.world_size:
        return (
            f"sp_degree={cell.sp_degree} x dp_replicate={cell.dp_replicate} x dp_shard={cell.dp_shard} is not"
            f" cluster.world_size={cell.cluster.world_size}; leave sp_degree or dp_shard at auto, or change"
            " cluster.world_size"
        )
    reasons = [
        *STRATEGIES[cell.strategy].refusals(cell),
        *KERNEL_FACTS[cell.kernel].refusals(cell),
        *_window_refusals(cell),
        *_engine_refusals(cell),
        *_trainer_refusals(cell),
        *_offload_refusals(cell),
        *mode_of(cell).refusals(cell),
    ]
    return "; ".join(reasons) or None


def _window_refusals(cell: RunConfig) -> list[str]:
    """Layers of a checkpoint that do not see the whole sequence."""
    if cell.model.path is None:
        return []
    numbers = read_config(Path(cell.model.path))
    return [
        f"{reason}, less than seq_len={cell.seq_len}, and strategies compute plain causal attention; take"
        f" seq_len={shortest_window(numbers)} or less"
        for reason in unplain_layers(numbers, cell.seq_len)
    ]


def _engine_refusals(cell: RunConfig) -> list[str]:
    if cell.engine.name not in ENGINE_DTYPES:
        return []  # a workload that trains nothing
    reasons = []
    dtypes = ENGINE_DTYPES[cell.engine.name]
    if cell.dtype not in dtypes:
        reasons.append(
            f"dtype={cell.dtype} is not for engine={cell.engine.name}; choose dtype={' or '.join(dtypes)}"
        )
    if cell.engine.name == "zero3" and cell.dp_replicate > 1:
        reasons.append(
            f"dp_replicate={cell.dp_replicate} is not for engine=zero3, which shards over all ranks; take"
            " dp_shard, or engine=fsdp2"
        )
    if cell.engine.leaf != NOT_USED and cell.engine.name != "zero3":
        reasons.append(
            f"engine.leaf={cell.engine.leaf} is DeepSpeed's own, and engine={cell.engine.name} has none; take"
            " engine=zero3"
        )
    return reasons


def _trainer_refusals(cell: RunConfig) -> list[str]:
    facts = TRAINER_FACTS.get(cell.trainer)
    return [] if facts is None else facts.refusals(cell)  # a workload that trains nothing has none


def _offload_refusals(cell: RunConfig) -> list[str]:
    reasons = []
    if cell.offload.activations and not cell.checkpointing:
        reasons.append(
            "offload.activations=true moves the inputs of checkpointed layers, and checkpointing=false keeps"
            " none; take checkpointing=true"
        )
    if cell.offload.optimizer and cell.engine.name not in OPTIMIZER_OFFLOAD_ENGINES:
        reasons.append(
            f"offload.optimizer=true is DeepSpeed's own, and engine={cell.engine.name} has none; take engine="
            + " or ".join(OPTIMIZER_OFFLOAD_ENGINES)
        )
    return reasons
