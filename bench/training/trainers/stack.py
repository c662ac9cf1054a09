"""A training stack of somebody else: its own loop, on the native loop's weights, samples and optimizer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.ranks.log import StepPhase
from bench.strategies.strategy import IGNORED_LABEL, Strategy, Wiring, attention_replaced
from bench.training.data import InputDigest, StepData, count_valid
from bench.training.loss import ModelWithLoss
from bench.training.trainer_facts import STACK_KERNELS
from bench.training.trainers.stack_engines import STACK_ENGINES, StackEngine, prepare_accelerate
from bench.training.trainers.trainer import Trainer

NEXT_LABELS = "next_labels"
"""A column with every token's label. DeepSpeed's loader makes `shift_labels` of `labels` by itself, and the
last token of each sequence gets none; with this column it has the label that it has in the native loop."""
SHIFT_LABELS = "shift_labels"
SAMPLES = 2**30
"""How many a loader believes there are: who asks for steps decides when the loop ends."""

Row = Mapping[str, Tensor]


class StackSamples(Dataset[Row]):
    """From step `first` on, `StepData`'s samples as a stack's distributed sampler asks for them."""

    def __init__(self, data: StepData, first: int, seq_len: int, *, shares_batches: bool) -> None:
        """With `shares_batches` the ranks of a sequence group each load a batch and train on all of them."""
        self.data = data
        self.first = first
        self.seq_len = seq_len
        self.ranks = data.cell.sp_degree if shares_batches else 1
        self.label_column = NEXT_LABELS if shares_batches else SHIFT_LABELS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Row:
        """One sequence, [seq_len] by column."""
        cell = self.data.cell
        batch, place = divmod(index, cell.batch)
        micro_step, group = dealt(cell, batch, self.ranks)
        step, within = divmod(micro_step, cell.grad_accum)
        whole = self.data.rows(self.first + step, within, group, self.seq_len)
        ids, labels = whole.input_ids[place], whole.labels[place]
        unshifted = torch.cat([labels.new_full((1,), IGNORED_LABEL), labels[:-1]])
        return {
            "input_ids": ids,
            "position_ids": whole.position_ids[place],
            "labels": unshifted,
            self.label_column: labels,
        }


def dealt(cell: Cell, batch: int, ranks: int) -> tuple[int, int]:
    """Micro-step, counted over all steps, and data-parallel group of a loader's batch.

    Batches go to processes in turn; of those, `ranks` neighbours train on one another's, first rank first.
    """
    round_, process = divmod(batch, cell.dp_degree * ranks)
    group, place = divmod(process, ranks)
    return round_ * ranks + place, group


def collated(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows as a batch, [B, seq_len] by column."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loader(samples: StackSamples) -> DataLoader[Any]:
    """A plain loader that keeps the order; it pins rows for a GPU, as Trainer's does."""
    return DataLoader(
        samples,
        batch_size=samples.data.cell.batch,
        collate_fn=collated,
        shuffle=False,
        pin_memory=samples.data.device.type == "cuda",
    )


ATTENTION_CODE: Mapping[str, str] = {
    "deepspeed_ulysses": "deepspeed.runtime.sequence_parallel",
    "torch_cp": "torch.distributed.tensor.experimental",
}


class StackSignal:
    """Hears of every call of the model; costs a few operations on [B, S] integers and scalars a call.

    A stack's loss is a mean: the mean over this rank's valid tokens, or the sum over `num_items_in_batch`.
    Times the number it was divided by it is the sum of token losses again.
    """

    def __init__(self, model: nn.Module, fed: InputDigest, phase: StepPhase) -> None:
        self.fed = fed
        self.phase = phase
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, with_kwargs=True)

    def take(self) -> tuple[Tensor, Tensor]:
        """This rank's loss sum and valid tokens since the last time."""
        loss_sum, valid = torch.stack(self._sums).sum(), torch.stack(self._counts).sum()
        self._sums.clear()
        self._counts.clear()
        return loss_sum, valid

    def _enter(self, _model: nn.Module, _args: Any, named: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.phase.enter("forward")
            self.fed.add(named["input_ids"], named[SHIFT_LABELS], named["position_ids"])

    def _leave(self, _model: nn.Module, _args: Any, named: Mapping[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            self.phase.enter("backward")
            if getattr(output, "loss", None) is not None:
                valid = count_valid(named[SHIFT_LABELS])
                items = named.get("num_items_in_batch")
                loss_sum = output.loss.detach().float() * (valid if items is None else items)
                self._sums.append(torch.where(valid > 0, loss_sum, torch.zeros_like(loss_sum)))
                self._counts.append(valid)


@dataclass(slots=True)
class StackTrainer(Trainer):
    """The model is transformers' own and computes its loss; the stack wraps, feeds, steps and logs."""

    engine: StackEngine
    model: PreTrainedModel
    signal: StackSignal

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
        """The stack over the model, of which a GPU holds as much as the engine leaves it."""
        cell = strategy.cell
        prepare_accelerate(cell)
        engine = STACK_ENGINES[cell.engine.name](cell, strategy.groups)
        plain: PreTrainedModel = engine.placed(model.model, layers, device)
        plain.set_attn_implementation(STACK_KERNELS[cell.kernel])
        signal = StackSignal(plain, model.fed, phase)
        trainer = cls(cell, engine, strategy, wiring, data, phase, model.fed, plain, signal)
        trainer.prepare()
        return trainer

    @abstractmethod
    def prepare(self) -> None:
        """Hand the model to the stack."""

    @property
    def attention_name(self) -> str:
        return STACK_KERNELS[self.cell.kernel]

    @property
    def attention_code(self) -> str:
        return ATTENTION_CODE.get(self.cell.strategy, "transformers.integrations")

    @contextmanager
    def watched(self, watch: AttentionWatch) -> Iterator[None]:
        """Around the function that transformers calls, which is whatever the stack has put there."""
        run = ALL_ATTENTION_FUNCTIONS[self.attention_name]

        def seen(
            module: nn.Module, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Any = None, **named: Any
        ) -> tuple[Tensor, Any]:
            def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = run(module, q, k, v, mask, **named)[0]
                return out.unflatten(-1, (-1, v.shape[-1])) if out.dim() == 3 else out  # noqa: PLR2004

            return watch.run(attention, q_BNSD, k_BKSD, v_BKSD), None

        with attention_replaced(self.attention_name, seen):
            yield

    def samples(self, first: int, seq_len: int) -> StackSamples:
        """Those from step `first` on."""
        return StackSamples(self.data, first, seq_len, shares_batches=self.shares_batches)

    @property
    def shares_batches(self) -> bool:
        """Whether DeepSpeed's loader gathers a batch from every rank of a sequence group."""
        return self.cell.strategy == "deepspeed_ulysses" and self.cell.sp_degree > 1

    @property
    def step_period(self) -> int:
        """DeepSpeed's loader gathers batches for as many micro-steps as ranks share a sequence."""
        degree = self.cell.sp_degree if self.shares_batches else 1
        return degree // math.gcd(degree, self.cell.grad_accum)

    def dealt_batches(self, accelerator: Any, model: Any, first: int, seq_len: int) -> Iterator[Any]:
        """What the stack's own loader gives this rank, from step `first` on."""
        prepared = accelerator.prepare_data_loader(loader(self.samples(first, seq_len)))
        if self.shares_batches:
            prepared = accelerator.deepspeed_ulysses_dl_adapter(prepared, model)
        return iter(prepared)
