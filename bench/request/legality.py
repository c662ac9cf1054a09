"""The rules that decide whether a cell can run: those of its strategy, kernel, engine, trainer and mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.config import NOT_USED, Cell
from bench.request.layer_types import layers_not_plain, shortest_window
from bench.request.modes import mode_of
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS, is_autocast
from bench.training.text_model import LENGTH_DEPENDENT_ROPE, read_config
from bench.training.trainer_facts import TRAINER_FACTS

WHOLE_WEIGHTS_ENGINE = "ddp"
"""Only engine whose ranks hold all weights, which `measure.weights` writes."""


def refusal(cell: Cell) -> str | None:
    """Return all reasons why the cell cannot run, each with a way out, in one line; None for a legal cell."""
    if cell.sp_degree * cell.dp_degree != cell.cluster.world_size:
        return (
            f"sp_degree={cell.sp_degree} x dp_replicate={cell.dp_replicate} x dp_shard={cell.dp_shard} is not"
            f" cluster.world_size={cell.cluster.world_size}; leave sp_degree or dp_shard at auto, or change"
            " cluster.world_size"
        )
    reasons = [
        *STRATEGIES[cell.strategy].refusals(cell),
        *(STRATEGIES[cell.strategy].autocast_refusals(cell) if is_autocast(cell) else ()),
        *KERNEL_FACTS[cell.kernel].refusals(cell),
        *_window_refusals(cell),
        *_engine_refusals(cell),
        *_trainer_refusals(cell),
        *_offload_refusals(cell),
        *_weights_refusals(cell),
        *mode_of(cell).refusals(cell),
    ]
    return "; ".join(reasons) or None


def _window_refusals(cell: Cell) -> list[str]:
    """Return the reasons why layers of a checkpoint are not plain causal attention at the cell's length."""
    if cell.model.path is None:
        return []
    config = read_config(Path(cell.model.path))
    return [
        f"{layers}, less than seq_len={cell.seq_len}, and strategies compute only plain causal attention;"
        f" take seq_len={shortest_window(config)} or less"
        for layers in layers_not_plain(config, cell.seq_len)
    ]


def _engine_refusals(cell: Cell) -> list[str]:
    facts = ENGINE_FACTS.get(cell.engine.name)
    if facts is None:
        return []  # a workload without training
    reasons = facts.refusals(cell)
    if cell.engine.leaf != NOT_USED and not facts.has_leaf:
        engines = [name for name, engine in ENGINE_FACTS.items() if engine.has_leaf]
        reasons.append(_deepspeed_only_refusal(f"engine.leaf={cell.engine.leaf}", cell, engines))
    return reasons


def _deepspeed_only_refusal(setting: str, cell: Cell, engines: Sequence[str]) -> str:
    way_out = f"take engine={' or '.join(engines)}"
    return f"{setting} is a setting of DeepSpeed, and engine={cell.engine.name} does not have it; {way_out}"


def _trainer_refusals(cell: Cell) -> list[str]:
    facts = TRAINER_FACTS.get(cell.trainer)
    return [] if facts is None else facts.refusals(cell)  # None for a workload without training


def _offload_refusals(cell: Cell) -> list[str]:
    reasons = []
    if cell.offload.activations and not cell.checkpointing:
        reasons.append(
            "offload.activations=true moves the inputs of checkpointed layers, and checkpointing=false keeps"
            " no such inputs; take checkpointing=true"
        )
    if cell.offload.optimizer and not ENGINE_FACTS[cell.engine.name].offloads_optimizer:
        engines = [name for name, engine in ENGINE_FACTS.items() if engine.offloads_optimizer]
        reasons.append(_deepspeed_only_refusal("offload.optimizer=true", cell, engines))
    return reasons


def _weights_refusals(cell: Cell) -> list[str]:
    if not cell.measure.weights:
        return []
    reasons = []
    if cell.engine.name != WHOLE_WEIGHTS_ENGINE:
        reasons.append(
            f"measure.weights=true: engine={cell.engine.name} does not keep whole weights on a rank; take"
            f" engine={WHOLE_WEIGHTS_ENGINE}"
        )
    if cell.model.rope_scaling in LENGTH_DEPENDENT_ROPE:
        reasons.append(
            f"measure.weights=true: the frequencies of model.rope_scaling={cell.model.rope_scaling} follow"
            " from the length, and no config.json can state them; take model.rope_scaling=none"
        )
    return reasons
