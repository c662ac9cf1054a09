"""Workload of training steps: a model, its engine and a trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from bench.attention.watch import AttentionWatch
from bench.measure.hooks import Spans, optimizer_step_spans
from bench.measure.mistakes import load_mistake
from bench.measure.timing.section import first_step_tokens
from bench.measure.workloads.workload import Workload, WorkloadRank
from bench.training.activation_memory import ActivationOffload, tile_mlps
from bench.training.data import open_data
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES, empty_model, sum_embedding_gradient_in_float32
from bench.training.trainer_facts import TRAINER_FACTS
from bench.training.trainers import trainer_code
from bench.training.trainers.trainer import StepOutcome, Trainer, WantsStep
from bench.training.weights import fill_layers, model_weights


class TrainWorkload(Workload):
    trainer: Trainer

    def __init__(self, rank: WorkloadRank) -> None:
        super().__init__(rank)
        cell = self.cell
        rank.begin("data" if cell.data.tokenizer is None else "tokenizing")
        model, data = _model(rank), open_data(cell, rank.device)
        rank.begin("model" if cell.model.path is None else "checkpoint")
        if cell.tiled_mlp:
            tile_mlps(model.model)
        if cell.offload.activations and not TRAINER_FACTS[cell.trainer].is_stack:
            self.activation_offload = ActivationOffload(rank.device)
            self.activation_offload.install(model.model)
        layers = fill_layers(model.model, model_weights(cell.model, cell.seed), rank.device)
        self.trainer = (
            load_mistake(cell.inject_fault)
            .trainer(trainer_code(cell.trainer))
            .build(model, layers, data, rank.strategy, rank.wiring, rank.device, rank.phase)
        )
        self.optimizer = self.trainer.engine
        self.attention_name = self.trainer.attention_name
        self.attention_modules = self.trainer.attention_modules
        self.step_period = self.trainer.step_period
        self.network = model
        self.sequence_ranks = cell.sp_degree

    def watch_attention(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        return self.trainer.watch_attention(watch)

    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        """Return a context that records the updates of the engine, or of all torch optimizers in a stack."""
        is_stack = TRAINER_FACTS[self.cell.trainer].is_stack
        return optimizer_step_spans(self.rank.phase) if is_stack else super().optimizer_spans()

    def input_positions(self) -> Tensor | None:
        positions = self.trainer.input_digest.positions
        return None if positions is None else positions[0]

    def take_steps(self, wants_step: WantsStep) -> None:
        self.trainer.run(wants_step)

    def step(self, number: int) -> StepOutcome:
        return self.trainer.step(number, self.cell.padded_len)

    def short_step(self) -> None:
        """Train on at most 2,048 tokens, which fills allocators, optimizer state and lazy imports."""
        multiple = self.rank.strategy.facts.length_multiple(self.cell)
        self.trainer.step(0, first_step_tokens(self.cell.padded_len, multiple))


def _model(rank: WorkloadRank) -> ModelWithLoss:
    """Return the model with its loss, without weights, in the dtype of master weights: float32 or float64."""
    cell = rank.strategy.cell
    torch.set_default_dtype(TORCH_DTYPES["fp64" if cell.dtype == "fp64" else "fp32"])
    model = empty_model(cell.model, attention_name=rank.wiring.attention_name, max_positions=cell.seq_len)
    if rank.device.type == "cpu":
        sum_embedding_gradient_in_float32(model)
    if cell.checkpointing:
        contexts = rank.strategy.checkpoint_contexts
        keywords = {} if contexts is None else {"context_fn": contexts}
        offloads = cell.offload.activations and TRAINER_FACTS[cell.trainer].is_stack
        model.gradient_checkpointing_enable({"use_reentrant": False, **keywords}, offload=offloads)
    model.train()
    return ModelWithLoss(model, cell.loss, rank.phase)


WORKLOAD = TrainWorkload
