"""Training steps: the model, its engine and the trainer whose loop runs."""

from __future__ import annotations

import torch

from bench.mistakes import mistaken
from bench.passes.timing.section import first_step_tokens
from bench.training.activation_offload import ActivationOffload
from bench.training.data import open_data
from bench.training.embedding import sum_embedding_gradient_in_float32
from bench.training.engines import ENGINES
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES, empty_model
from bench.training.tiled_mlp import tile_mlps
from bench.training.trainers import TRAINERS
from bench.training.trainers.trainer import StepOutcome, Trainer
from bench.training.weights import filled_layers, numbers_of
from bench.workloads.workload import Rank, Workload


class Train(Workload):
    trainer: Trainer

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        cell = self.cell
        model, data = _model(rank), open_data(cell, rank.device)
        if cell.tiled_mlp:
            tile_mlps(model.model)
        if cell.offload.activations:
            self.activation_offload = ActivationOffload(rank.device)
            self.activation_offload.install(model.model)
        layers = filled_layers(model.model, numbers_of(cell.model, cell.seed), rank.device)
        self.optimizer = ENGINES[cell.engine](model, layers, cell, rank.strategy.groups, rank.device)
        self.trainer = mistaken(cell.mistake).trainer(TRAINERS[cell.trainer])(
            cell, self.optimizer, rank.strategy, rank.wiring, data, rank.phase, model.fed
        )

    def step(self, number: int) -> StepOutcome:
        return self.trainer.step(number, self.cell.seq_len)

    def short_step(self) -> None:
        """At most 2,048 tokens: allocators, optimizer state, lazy imports."""
        multiple = self.rank.strategy.facts.length_multiple(self.cell)
        self.trainer.step(0, first_step_tokens(self.cell.seq_len, multiple))


def _model(rank: Rank) -> ModelWithLoss:
    """The model with its loss and no numbers, in the dtype of its master weights: float32, or float64."""
    cell = rank.strategy.cell
    torch.set_default_dtype(TORCH_DTYPES["fp64" if cell.dtype == "fp64" else "fp32"])
    model = empty_model(cell.model, attention_name=rank.wiring.attention_name, max_positions=cell.seq_len)
    if rank.device.type == "cpu":
        sum_embedding_gradient_in_float32(model)
    if cell.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return ModelWithLoss(model, cell.loss, rank.phase)
