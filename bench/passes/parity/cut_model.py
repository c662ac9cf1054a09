"""The parity pass on a two-layer cut of the model: one step's loss and gradients against float64 on one rank.

The cell's own trainer, strategy and loss run it; only layers, vocabulary and MLP are cut, and the engine is
DDP, because what is in question is the objective and not how parameters are sharded. A third of the labels
does not count, so that ranks hold unequal numbers of valid tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.documents import Documents
from bench.config import LOW_PRECISION, DataConfig, RunConfig
from bench.passes.losses.rank import all_fed, expected_digest
from bench.passes.parity.exact import masked_attention, visible
from bench.ranks.log import StepPhase
from bench.strategies.strategy import Batch
from bench.training.data import count_valid, open_data
from bench.training.engines import ENGINES
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES, build_model
from bench.training.trainers import trainer_code
from bench.training.trainers.trainer import Trainer

CUT_LAYERS = 2
CUT_VOCABULARY = 512
UNCOUNTED_SHARE = 3
"""One label in so many does not count."""
PLAIN_NAME = "bench_plain_attention"


@dataclass(frozen=True, slots=True)
class Signal:
    """What a step tells the optimizer: the global mean loss, and all averaged gradients in one vector."""

    loss: Tensor
    gradients: Tensor

    def errors_of(self, found: Signal) -> dict[str, float]:
        """How far another signal is from this one, relative; gradients by Euclidean length."""
        pairs = {"loss": (found.loss, self.loss), "gradients": (found.gradients, self.gradients)}
        return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


@dataclass(frozen=True, slots=True)
class Share:
    """Sequences whose valid tokens weigh `weight` each in the loss."""

    batch: Batch
    weight: float


@dataclass(frozen=True, slots=True)
class CutStep:
    """One step of the cut: what was found, and the model and whole sequences to say what it should be."""

    found: Signal
    reference: ModelWithLoss
    attention: PlainAttention
    """What the reference attends by."""
    sequences: list[Batch]
    saw_the_step: bool

    def exact(self) -> Signal:
        """The signal in float64 of whole sequences on one rank."""
        return self.signal_of(self.mean_over_tokens())

    def mean_over_tokens(self) -> list[Share]:
        """Every valid token weighs the same: the objective."""
        valid = sum(int(count_valid(batch.labels)) for batch in self.sequences)
        return [Share(batch, 1 / valid) for batch in self.sequences]

    def signal_of(self, shares: Sequence[Share]) -> Signal:
        """The float64 signal of a weighted sum of token losses."""
        return _signal(self.reference, shares, self.attention)

    def plain(self, device: torch.device, dtype: str) -> Signal:
        """The exact step in the cell's dtype, as the same engine computes it on one rank."""
        wide = torch.float64 if dtype == "fp64" else torch.float32
        model = copy.deepcopy(self.reference).to(wide)
        with torch.autocast(device.type, TORCH_DTYPES[dtype], enabled=dtype in LOW_PRECISION):
            return _signal(model, self.mean_over_tokens(), self.attention)


@contextmanager
def cut_step(trainer: Trainer, seq_len: int, device: torch.device) -> Iterator[CutStep]:
    """Run one step of the cut model; every rank must call it. Plain attention is there while it lasts."""
    cell, wiring = cut_cell(trainer.cell, seq_len), trainer.wiring
    model = build_model(
        cell.model, attention_name=wiring.attention_name, max_positions=seq_len, seed=cell.seed
    )
    data = open_data(cell, device, uncounted_tokens=seq_len // UNCOUNTED_SHARE)
    with plain_attention_installed() as attention:
        reference = copy.deepcopy(model)
        reference.config._attn_implementation = PLAIN_NAME
        whole = ModelWithLoss(model.train(), cell.loss, StepPhase())
        engine = ENGINES["ddp"](whole, (), cell, trainer.strategy.groups, device)
        loop = trainer_code(cell.trainer)
        cut = loop(cell, engine, trainer.strategy, wiring, data, StepPhase(), whole.fed)
        yield CutStep(
            found=_found(cut, seq_len),
            reference=ModelWithLoss(reference.train(), cell.loss, StepPhase()).to(device, torch.float64),
            attention=attention,
            sequences=data.whole_step(0, seq_len),
            saw_the_step=all_fed(cut.fed.take()) == expected_digest(data, 0, seq_len),
        )


def cut_cell(cell: RunConfig, seq_len: int) -> RunConfig:
    """The same cell on a model of two layers, a small vocabulary and a narrow MLP."""
    model = replace(
        cell.model,
        path=None,
        num_layers=CUT_LAYERS,
        vocab_size=min(cell.model.vocab_size, CUT_VOCABULARY),
        intermediate_size=min(cell.model.intermediate_size, cell.model.hidden_size),
    )
    data = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0, packing=cell.data.packing)
    return replace(cell, model=model, data=data, seq_len=seq_len, padding=0, checkpointing=False)


def _found(cut: Trainer, seq_len: int) -> Signal:
    """The step as all ranks together computed it."""
    loss_sum, valid_tokens = cut.accumulate(0, seq_len)
    total = loss_sum.double()
    dist.all_reduce(total)
    gradients = (gradient for _, gradient in cut.engine.full_gradients())
    return Signal(total / valid_tokens.clamp(min=1), _vector(gradients))


def _signal(model: ModelWithLoss, shares: Sequence[Share], attention: PlainAttention) -> Signal:
    model.zero_grad()
    losses = []
    for share in shares:
        attention.documents = share.batch.documents
        losses.append(share.weight * model.loss_of(share.batch))
    loss = torch.stack(losses).sum()
    loss.backward()
    return Signal(loss.detach().double(), _vector(p.grad for p in model.parameters() if p.grad is not None))


def _vector(gradients: Any) -> Tensor:
    return torch.cat([gradient.detach().double().flatten() for gradient in gradients])


class PlainAttention:
    """Transformers' own eager attention takes its softmax in float32; this one stays in its dtype."""

    documents: Documents | None = None
    """Of the batch that goes through the model."""

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        mask: Tensor | None,  # noqa: ARG002
        **keywords: Any,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        q, k = q_BNSD.to(v_BKSD.dtype), k_BKSD.to(v_BKSD.dtype)
        visible_keys = visible(q.shape[2], causal=True, device=q.device, documents=self.documents)
        return masked_attention(q, k, v_BKSD, visible_keys).transpose(1, 2), None


@contextmanager
def plain_attention_installed() -> Iterator[PlainAttention]:
    """Let transformers find plain attention by its name for as long as the context lasts."""
    attention = PlainAttention()
    ALL_ATTENTION_FUNCTIONS[PLAIN_NAME] = attention
    try:
        yield attention
    finally:
        del ALL_ATTENTION_FUNCTIONS[PLAIN_NAME]
