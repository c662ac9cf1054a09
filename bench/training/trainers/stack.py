"""Base class of trainers that run a training stack, the training loop of another project.

Weights, samples and optimizer are those of the native loop. Shapes: B sequences of S tokens; N query heads, K
KV heads and head size D.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.ranks.log import StepPhase
from bench.strategies.strategy import IGNORED_LABEL, Strategy, Wiring, register_attention
from bench.training.data import InputDigest, StepData, count_valid
from bench.training.loss import CHUNK_TOKENS, ModelWithLoss, untiled_losses
from bench.training.position_losses import PositionLosses
from bench.training.trainer_facts import STACK_KERNELS
from bench.training.trainers.stack_engines import STACK_ENGINES, StackEngine, prepare_accelerate
from bench.training.trainers.trainer import Trainer, WantsStep

NEXT_LABELS = "next_labels"
"""Column with the label of every token. DeepSpeed's loader makes `shift_labels` from `labels`, which leaves
the last token of a sequence without a label. Here the last token has one, as in the native loop."""
SHIFT_LABELS = "shift_labels"
"""Keyword with which transformers' models take labels that are already shifted."""
SAMPLES = 2**30
"""Nominal number of samples of a loader, which no cell reaches."""

Row = Mapping[str, Tensor]
"""Columns of one sequence, each of shape [seq_len]."""


class StackSamples(Dataset[Row]):
    """Samples of `StepData` from step `first_step` on, in the order in which a stack's sampler takes them."""

    def __init__(self, data: StepData, first_step: int, seq_len: int, *, shares_batches: bool) -> None:
        """Create the data set, whose first samples belong to step `first_step`.

        With `shares_batches` the ranks of a sequence group load different sequences and train together on the
        batch of each rank, one after another. Without it they all load the same sequences.
        """
        self.data = data
        self.first_step = first_step
        self.seq_len = seq_len
        self.ranks = data.cell.sp_degree if shares_batches else 1
        self.label_column = NEXT_LABELS if shares_batches else SHIFT_LABELS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Row:
        """Return one sequence; `index` counts those that a stack's loader gives to all processes."""
        cell = self.data.cell
        batch, row = divmod(index, cell.batch)
        micro_step, data_rank = batch_place(cell, batch, self.ranks)
        step, step_micro_step = divmod(micro_step, cell.grad_accum)
        whole = self.data.host_micro_batch(self.first_step + step, step_micro_step, data_rank, self.seq_len)
        ids, labels = whole.input_ids[row], whole.labels[row]
        unshifted = torch.cat([labels.new_full((1,), IGNORED_LABEL), labels[:-1]])
        return {
            "input_ids": ids,
            "position_ids": whole.position_ids[row],
            "labels": unshifted,
            self.label_column: labels,
        }


def batch_place(cell: Cell, batch: int, ranks: int) -> tuple[int, int]:
    """Return the micro-step, counted over all steps, and the data-parallel rank of a loader's batch.

    The loader gives batch i to process i modulo the number of processes. `ranks` neighbouring processes form
    a sequence group. It trains on the batch of its first process, then on that of its second, and so on.
    """
    round_, process = divmod(batch, cell.dp_degree * ranks)
    data_rank, group_rank = divmod(process, ranks)
    return round_ * ranks + group_rank, data_rank


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return rows as one batch, with columns of shape [B, seq_len]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def make_loader(samples: StackSamples) -> DataLoader[Any]:
    """Return a loader that keeps the order of the samples, and pins memory for a GPU as Trainer does."""
    return DataLoader(
        samples,
        batch_size=samples.data.cell.batch,
        collate_fn=collate,
        shuffle=False,
        pin_memory=samples.data.device.type == "cuda",
    )


SDPA_BACKENDS: Mapping[str, SDPBackend] = {
    "torch_flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Backend of torch's `scaled_dot_product_attention` by kernel; left to itself torch takes cuDNN on Hopper."""

ATTENTION_CODE: Mapping[str, str] = {
    "deepspeed_ulysses": "deepspeed.runtime.sequence_parallel",
    "torch_cp": "torch.distributed.tensor.experimental",
}
"""Prefix of the names of the modules with a stack's code for attention communication, by strategy."""


class LossRecorder:
    """Recorder of the loss sum and the valid tokens of every forward pass, by hooks on the model.

    The model's loss in a stack is a sum divided by the number of this rank's valid tokens, or by
    `num_items_in_batch` if the stack passes it. The hooks multiply the loss by that number, which costs a few
    operations on integers [B, S] and scalars per call.
    """

    def __init__(
        self, model: nn.Module, input_digest: InputDigest, position_losses: PositionLosses, phase: StepPhase
    ) -> None:
        self.input_digest = input_digest
        self.position_losses = position_losses
        self.phase = phase
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, with_kwargs=True)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the number of valid tokens of this rank since the last call."""
        loss_sum, valid = torch.stack(self._sums).sum(), torch.stack(self._counts).sum()
        self._sums.clear()
        self._counts.clear()
        return loss_sum, valid

    def _enter(self, _model: nn.Module, _args: Any, named: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.phase.enter("forward")
            self.input_digest.add(named["input_ids"], named[SHIFT_LABELS], named["position_ids"])

    def _leave(self, _model: nn.Module, _args: Any, named: Mapping[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            self.phase.enter("backward")
            if getattr(output, "loss", None) is not None:
                valid = count_valid(named[SHIFT_LABELS])
                items = named.get("num_items_in_batch")
                loss_sum = output.loss.detach().float() * (valid if items is None else items)
                self._sums.append(torch.where(valid > 0, loss_sum, torch.zeros_like(loss_sum)))
                self._counts.append(valid)
                if self.position_losses.is_recording:
                    labels = named[SHIFT_LABELS]
                    losses = _token_losses(output, labels)
                    if losses is not None:
                        self.position_losses.add(losses, labels, named["position_ids"])


@torch.no_grad()
def _token_losses(output: Any, labels_BS: Tensor) -> Tensor | None:
    """Return the loss of each token, B * S in all; None if the output has no log-probabilities or logits.

    TRL's fused head returns `log_probs` of the labels instead of logits. Of logits at most CHUNK_TOKENS rows
    are converted to float32 at a time.
    """
    if getattr(output, "log_probs", None) is not None:
        losses: Tensor = -output.log_probs
        return losses
    if getattr(output, "logits", None) is None:
        return None
    logits_RV, labels_R = output.logits.flatten(0, 1), labels_BS.flatten()
    chunks = zip(logits_RV.split(CHUNK_TOKENS), labels_R.split(CHUNK_TOKENS), strict=True)
    return torch.cat([untiled_losses(nn.Identity(), logits, labels) for logits, labels in chunks])


@dataclass(slots=True)
class StackTrainer(Trainer):
    """Trainer whose model computes the loss; the stack wraps the model, loads batches, updates and logs."""

    engine: StackEngine
    model: PreTrainedModel
    loss_recorder: LossRecorder

    counts_own_tokens: ClassVar[bool] = True

    @classmethod
    def build(
        cls,
        model: ModelWithLoss,
        layers: Iterator[nn.Module],
        data: StepData,
        strategy: Strategy,
        wiring: Wiring,
        device: torch.device,
        phase: StepPhase,
    ) -> Self:
        """Return the trainer, with the model prepared by the stack; see `Trainer.build` for the arguments."""
        cell = strategy.cell
        prepare_accelerate(cell)
        engine = STACK_ENGINES[cell.engine.name](cell, strategy.groups)
        placed: PreTrainedModel = engine.place(model.model, layers, device)
        placed.set_attn_implementation(STACK_KERNELS[cell.kernel])
        recorders = model.input_digest, model.position_losses
        loss_recorder = LossRecorder(placed, *recorders, phase)
        trainer = cls(cell, engine, strategy, wiring, data, phase, *recorders, placed, loss_recorder)
        trainer.prepare()
        return trainer

    @abstractmethod
    def prepare(self) -> None:
        """Give the model to the stack; `engine` is attached here or before the first step."""

    def run(self, wants_step: WantsStep) -> None:
        """Run the stack's loop, in which torch may attend with the cell's kernel only, also in backward."""
        backend = SDPA_BACKENDS.get(self.cell.kernel)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            self.run_loop(wants_step)

    @abstractmethod
    def run_loop(self, wants_step: WantsStep) -> None:
        """Run the stack's loop; see `run`."""

    @property
    def attention_name(self) -> str:
        return STACK_KERNELS[self.cell.kernel]

    @property
    def attention_modules(self) -> str:
        return ATTENTION_CODE.get(self.cell.strategy, "transformers.integrations")

    @contextmanager
    def watch_attention(self, watch: AttentionWatch) -> Iterator[None]:
        """Wrap the attention function in transformers' registry, which the stack may have replaced."""
        run = ALL_ATTENTION_FUNCTIONS[self.attention_name]

        def watched_attention(
            module: nn.Module, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Any = None, **named: Any
        ) -> tuple[Tensor, Any]:
            def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                # Some attention functions return [B, S, N * D], the others [B, S, N, D].
                out: Tensor = run(module, q, k, v, mask, **named)[0]
                return out.unflatten(-1, (-1, v.shape[-1])) if out.dim() == 3 else out  # noqa: PLR2004

            return watch.run(attention, q_BNSD, k_BKSD, v_BKSD, named.get("position_ids")), None

        with register_attention(self.attention_name, watched_attention):
            yield

    def samples(self, first_step: int, seq_len: int) -> StackSamples:
        """Return the samples from step `first_step` on."""
        return StackSamples(self.data, first_step, seq_len, shares_batches=self.shares_batches)

    @property
    def shares_batches(self) -> bool:
        """True if DeepSpeed's loader gathers a different batch from each rank of a sequence group."""
        return self.cell.strategy == "deepspeed_ulysses" and self.cell.sp_degree > 1

    @property
    def step_period(self) -> int:
        """Number of steps after which DeepSpeed's loader gathers batches at the start of a step again."""
        degree = self.cell.sp_degree if self.shares_batches else 1
        return degree // math.gcd(degree, self.cell.grad_accum)

    def rank_batches(self, accelerator: Any, model: Any, first_step: int, seq_len: int) -> Iterator[Any]:
        """Return the batches that the stack's own loader gives this rank, from step `first_step` on."""
        prepared = accelerator.prepare_data_loader(make_loader(self.samples(first_step, seq_len)))
        if self.shares_batches:
            prepared = accelerator.deepspeed_ulysses_dl_adapter(prepared, model)
        return iter(prepared)
