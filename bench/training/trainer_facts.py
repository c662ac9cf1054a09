"""Table of the trainers: their strategies, engines, kernels and packages. Must not import torch.

The table decides which combinations of trainer, strategy and engine run; all others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.config import Cell

NATIVE = "native"
SDPA = "sdpa"
STACK_KERNELS: Mapping[str, str] = {
    "torch_flash": SDPA,
    "cudnn": SDPA,
    "flash_attn_2": "flash_attention_2",
    "flash_attn_3": "flash_attention_3",
}
"""Names in transformers of the kernels that it shares with us. A stack runs `sdpa` with one backend only."""
UNTILED = "untiled"
"""Value of `loss` that computes all logits at once."""
STACK_DTYPES = ("bf16", "fp32")

STACK_ENGINE = "zero3"
"""Engine of training stacks if the request names none."""

EnginesByStrategy = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """Facts of one trainer."""

    engines_by_strategy: EnginesByStrategy | None = None
    """Engines that the trainer can use, by strategy; None if it can use all engines with all strategies."""
    package: str | None = None
    """Distribution that the trainer needs in addition to those of the strategy and the engine."""

    @property
    def is_stack(self) -> bool:
        """True if the trainer is a training stack, that is, the training loop of another project."""
        return self.engines_by_strategy is not None

    def refusals(self, cell: Cell) -> list[str]:
        """Return the reasons why the trainer cannot train this cell, each with a way out."""
        if self.engines_by_strategy is None:
            return []
        return [*_pair_refusals(cell, self.engines_by_strategy), *_setting_refusals(cell)]


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
    """Return whether a trainer is a training stack; False for `native` and for a cell that does not train."""
    return trainer in TRAINER_FACTS and TRAINER_FACTS[trainer].is_stack


def _pair_refusals(cell: Cell, engines_by_strategy: EnginesByStrategy) -> list[str]:
    trainer, engines = f"trainer={cell.trainer}", engines_by_strategy.get(cell.strategy)
    if engines is None:
        legal = " or ".join(engines_by_strategy)
        return [f"{trainer} has no strategy={cell.strategy}; take trainer={NATIVE}, or strategy={legal}"]
    if cell.engine.name not in engines:
        legal = " or ".join(engines)
        return [f"{trainer} runs strategy={cell.strategy} under engine={legal}, not {cell.engine.name}"]
    return []


def _setting_refusals(cell: Cell) -> list[str]:
    kernels, dtypes, native = " or ".join(STACK_KERNELS), " or ".join(STACK_DTYPES), f"trainer={NATIVE}"
    conditions = (
        (
            cell.kernel not in STACK_KERNELS,
            f"runs transformers' own attention, which has no kernel={cell.kernel}; choose kernel={kernels}",
        ),
        (
            cell.loss != UNTILED,
            f"computes the loss itself; leave loss at auto, or choose loss={UNTILED}",
        ),
        (cell.dtype not in STACK_DTYPES, f"has no dtype={cell.dtype}; choose dtype={dtypes}"),
        (
            _needs_masks_of_flash(cell),
            f"masks documents, and kernel={cell.kernel} takes no mask on a GPU; choose kernel=cudnn",
        ),
        (
            cell.trainer == "accelerate" and _averages_unequal_batches(cell),
            (
                "averages losses over ranks and micro-steps, which hold unequal numbers of labels; take"
                f" trainer=transformers, or {native}"
            ),
        ),
        (
            cell.tiled_mlp or cell.offload.optimizer,
            f"supports neither tiled_mlp nor offload.optimizer; leave them false, or take {native}",
        ),
        (
            cell.offload.activations and cell.cluster.device == "cpu",
            f"offloads to pinned memory, which needs a GPU; take offload.activations=false, or {native}",
        ),
        (
            _gathers_losses_in_several_gloo_groups(cell),
            (
                "gathers losses, which gloo can do in one group only; take dp_replicate=1 dp_shard=1,"
                f" {native}, or GPUs"
            ),
        ),
        (
            cell.dp_replicate > 1 and cell.engine.name != "ddp",
            (
                f"keeps one sharded copy of the model, not dp_replicate={cell.dp_replicate}; take"
                f" dp_replicate=1 dp_shard={cell.dp_degree}, or {native}"
            ),
        ),
    )
    return [f"trainer={cell.trainer} {reason}" for is_refused, reason in conditions if is_refused]


def _needs_masks_of_flash(cell: Cell) -> bool:
    """Return whether transformers passes masks of documents to torch's flash kernel, which refuses them.

    Where ranks share a sequence DeepSpeed drops the mask.
    """
    is_flash = cell.kernel == "torch_flash" and cell.cluster.device == "cuda"
    return is_flash and cell.data.packs and cell.sp_degree == 1


def _averages_unequal_batches(cell: Cell) -> bool:
    """Return whether the mean over data-parallel ranks and micro-steps is not that over all labels."""
    return (cell.data.packs or cell.data.name == "tasks") and cell.dp_degree * cell.grad_accum > 1


def _gathers_losses_in_several_gloo_groups(cell: Cell) -> bool:
    """Return whether the trainer gathers losses in each of several sequence groups on gloo.

    torch's differentiable all_gather works on gloo only in the group that begins with rank 0. Accelerate's
    loop always gathers losses, the loop of transformers only with DeepSpeed's Ulysses.
    """
    gathers = cell.trainer == "accelerate" or cell.strategy == "deepspeed_ulysses"
    return gathers and cell.cluster.backend == "gloo" and cell.sp_degree > 1 and cell.dp_degree > 1
