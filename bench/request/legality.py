"""Can this cell run here at all? The one table of what a trainer, an engine and a strategy do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.command import tool_words
from bench.config import NO_MISTAKE, NOT_USED, ConfigError, RunConfig
from bench.cost.band import End
from bench.cost.calibrated_speeds import speeds_of
from bench.cost.hardware import Hardware
from bench.environment import CUDA_PACKAGES, installed
from bench.mistakes import MISTAKES
from bench.request.hardware import hardware_of, known_hardware
from bench.request.layer_types import shortest_window, unplain_layers
from bench.request.model_numbers import read_config
from bench.request.replay import replay_refusals
from bench.request.target import PREDICT, REPLAY
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import TRAINER_FACTS

ENGINE_PACKAGES = {"zero3": "deepspeed"}
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
        *_mistake_refusals(cell),
        *_trainer_refusals(cell),
        *_offload_refusals(cell),
        *IN_MODE[cell.mode](cell),
    ]
    return "; ".join(reasons) or None


def _prediction_refusals(cell: RunConfig) -> list[str]:
    """Why no arithmetic tells what the cell takes. A prediction needs none of the cell's packages."""
    try:
        hardware = hardware_of(cell.hardware)
    except ConfigError as error:
        return [str(error)]
    reasons = []
    if cell.cluster.device == "cpu" and cell.hardware in known_hardware():
        reasons.append(f"hardware={cell.hardware} is a GPU, and the ranks are on the CPU; take cluster=auto")
    if cell.cluster.ranks_per_gpu > 1:
        reasons.append(
            f"mode=predict does not know how ranks share a GPU, as with cluster.ranks_per_gpu="
            f"{cell.cluster.ranks_per_gpu}; take cluster.ranks_per_gpu=1"
        )
    if cell.workload.name != "train":
        reasons.append(f"mode=predict is not for workload={cell.workload.name}; take workload=train")
    if cell.data.packs:
        reasons.append(
            "mode=predict is not for data.packing=documents, whose lengths it does not know; take"
            " data.packing=none"
        )
    if STRATEGIES[cell.strategy].schedule(cell) is None:
        reasons.append(
            f"mode=predict knows no schedule of {cell.strategy}; give its facts one: Facts.schedule"
        )
    return reasons + _rate_refusals(cell, hardware)


def _rate_refusals(cell: RunConfig, hardware: Hardware) -> list[str]:
    """Which of the cell's operations the hardware's file has no figures of."""
    if speeds_of(hardware, End.EXPECTED).knows(cell):
        return []
    asked = (
        f"kernel={cell.kernel} with dtype={cell.dtype} and engine={cell.engine.name} on"
        f" hardware={cell.hardware}"
    )
    bound = STRATEGIES[cell.strategy].kernels
    known = [kernel for kernel in hardware.attention_forward if bound is None or kernel in bound]
    way_out = f"choose kernel={' or '.join(known)}, dtype=bf16 or fp32, or " if known else ""
    return [f"mode=predict knows no rate of {asked}; {way_out}measure it: {tool_words('bench.calibrate')}"]


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


def _mistake_refusals(cell: RunConfig) -> list[str]:
    """Why the cell's mistake would change nothing."""
    if cell.mistake == NO_MISTAKE or MISTAKES[cell.mistake].needs(cell):
        return []
    return [f"mistake={cell.mistake} would change nothing here: {MISTAKES[cell.mistake].way_out}"]


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


def needed_packages(cell: RunConfig) -> dict[str, str]:
    """The distributions that a cell cannot run without, by the choice that needs them."""
    if cell.mode == PREDICT:
        return {}
    trainer = TRAINER_FACTS.get(cell.trainer)
    needed = {
        f"strategy={cell.strategy}": STRATEGIES[cell.strategy].package,
        f"engine={cell.engine.name}": ENGINE_PACKAGES.get(cell.engine.name),
        f"trainer={cell.trainer}": None if trainer is None else trainer.package,
    }
    return {choice: package for choice, package in needed.items() if package is not None}


def used_packages(cell: RunConfig) -> frozenset[str]:
    """The distributions that may change what a cell measures, torch among them; none for a prediction."""
    if cell.mode == PREDICT:
        return frozenset()
    kernel = KERNEL_FACTS[cell.kernel].package
    return frozenset(
        [
            "torch",
            *needed_packages(cell).values(),
            *([] if kernel is None else [kernel]),
            *(["transformers"] if cell.workload.name == "train" else []),
            *(CUDA_PACKAGES if cell.cluster.device == "cuda" else ()),
            *STRATEGIES.packages(cell.strategy),
        ]
    )


def _missing_packages(cell: RunConfig) -> list[str]:
    facts = STRATEGIES[cell.strategy]
    missing = {
        choice: package for choice, package in needed_packages(cell).items() if installed(package) is None
    }
    return [
        f"{choice} needs the package {package}; install it with: "
        + (facts.install if package == facts.package else f"pip install {package}")
        for choice, package in missing.items()
    ]


def _package_refusals(cell: RunConfig) -> list[str]:
    return [*KERNEL_FACTS[cell.kernel].package_refusals(cell), *_missing_packages(cell)]


IN_MODE: Mapping[str, Callable[[RunConfig], list[str]]] = {
    "measure": _package_refusals,
    REPLAY: lambda cell: [*replay_refusals(cell), *_package_refusals(cell)],
    PREDICT: _prediction_refusals,
}
"""Why a cell cannot run in a mode that could in another."""
