"""Trainers as they are known without torch: what each drives, on which kernels, and what it needs.

The table that says which (trainer, strategy, engine) triples run; every other triple is refused by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.config import Cell

NATIVE = "native"
SDPA = "sdpa"
STACK_KERNELS: Mapping[str, str] = {
    "torch_flash": SDPA,
    "flash_attn_2": "flash_attention_2",
    "flash_attn_3": "flash_attention_3",
}
"""What transformers calls the kernels of ours that it has, too; `sdpa` leaves the choice to torch."""
UNTILED = "untiled"
STACK_DTYPES = ("bf16", "fp32")

STACK_ENGINE = "zero3"
"""Engine that training stacks take unless the request names another."""

EnginesByStrategy = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """What a trainer can be asked for."""

    drives: EnginesByStrategy | None = None
    """The engines that it drives, by strategy; None for all of ours, in every combination."""
    package: str | None = None
    """The distribution that it needs beside those of the strategy and the engine."""

    @property
    def is_stack(self) -> bool:
        """Whether it is somebody else's training stack."""
        return self.drives is not None

    def refusals(self, cell: Cell) -> list[str]:
        """Why it cannot train this cell, each with a way out."""
        if self.drives is None:
            return []
        return [*_pair_refusals(cell, self.drives), *_setting_refusals(cell)]


_ENGINES: EnginesByStrategy = {
    "local": ("ddp", "fsdp2", "zero3"),
    "deepspeed_ulysses": ("zero3",),
    "torch_cp": ("fsdp2",),
}

TRAINER_FACTS: Mapping[str, TrainerFacts] = {
    NATIVE: TrainerFacts(),
    "accelerate": TrainerFacts(_ENGINES, "accelerate"),
    "transformers": TrainerFacts(_ENGINES, "accelerate"),
    "trl": TrainerFacts(_ENGINES, "trl"),
}


def is_stack(trainer: str) -> bool:
    """Whether somebody else's training stack runs: neither a loop of ours nor, without training, none."""
    return trainer in TRAINER_FACTS and TRAINER_FACTS[trainer].is_stack


def _pair_refusals(cell: Cell, drives: EnginesByStrategy) -> list[str]:
    trainer, engines = f"trainer={cell.trainer}", drives.get(cell.strategy)
    if engines is None:
        others = " or ".join(drives)
        return [f"{trainer} has no strategy={cell.strategy}; take trainer={NATIVE}, or strategy={others}"]
    if cell.engine.name not in engines:
        others = " or ".join(engines)
        return [f"{trainer} runs strategy={cell.strategy} under engine={others}, not {cell.engine.name}"]
    return []


def _setting_refusals(cell: Cell) -> list[str]:
    kernels, dtypes, native = " or ".join(STACK_KERNELS), " or ".join(STACK_DTYPES), f"trainer={NATIVE}"
    refused = (
        (
            cell.kernel not in STACK_KERNELS,
            f"runs transformers' own attention, which has no kernel={cell.kernel}; choose kernel={kernels}",
        ),
        (
            cell.loss != UNTILED,
            f"computes the loss itself, of all logits at once; leave loss at auto, or choose loss={UNTILED}",
        ),
        (cell.dtype not in STACK_DTYPES, f"has no dtype={cell.dtype}; choose dtype={dtypes}"),
        (
            cell.data.packs or cell.padding > 0,
            f"has no documents and no padding; take data.packing=none and pad=false, or {native}",
        ),
        (
            cell.tiled_mlp or cell.offload.activations or cell.offload.optimizer,
            f"runs without tiled_mlp and offload.*; leave them false, or take {native}",
        ),
        (
            _gathers_losses_of_some_ranks(cell),
            f"gathers losses as gloo can for one group of ranks only; take dp_shard=1, {native}, or GPUs",
        ),
        (
            cell.dp_replicate > 1 and cell.engine.name != "ddp",
            f"is configured with one sharded copy, not dp_replicate={cell.dp_replicate}; take dp_shard",
        ),
    )
    return [f"trainer={cell.trainer} {reason}" for is_refused, reason in refused if is_refused]


def _gathers_losses_of_some_ranks(cell: Cell) -> bool:
    """Whether several groups gather losses; transformers' own loop does so for DeepSpeed's Ulysses only.

    torch's differentiable all_gather finds on gloo only a group that begins with rank 0.
    """
    gathers = cell.trainer == "accelerate" or cell.strategy == "deepspeed_ulysses"
    return gathers and cell.cluster.backend == "gloo" and cell.sp_degree > 1 and cell.dp_degree > 1
