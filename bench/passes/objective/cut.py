"""A cut of the model for machines on which the whole has no room in float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.config import DataConfig, RunConfig
from bench.ranks.log import StepPhase
from bench.training.data import open_data
from bench.training.engines import ENGINES
from bench.training.loss import ModelWithLoss
from bench.training.models import build_model
from bench.training.trainers import trainer_code
from bench.training.trainers.trainer import Trainer

CUT_LAYERS = 2
CUT_VOCABULARY = 512


def cut_cell(cell: RunConfig, seq_len: int) -> RunConfig:
    """The same cell on a model of two layers, a small vocabulary and a narrow MLP, with random weights."""
    model = replace(
        cell.model,
        path=None,
        num_layers=CUT_LAYERS,
        vocab_size=min(cell.model.vocab_size, CUT_VOCABULARY),
        intermediate_size=min(cell.model.intermediate_size, cell.model.hidden_size),
    )
    data = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0, packing=cell.data.packing)
    return replace(cell, model=model, data=data, seq_len=seq_len, padding=0, checkpointing=False)


def cut_trainer(trainer: Trainer, tokens: int, device: torch.device) -> Trainer:
    """The trainer's loop on the cut, under DDP; every rank must call it."""
    cell, wiring = cut_cell(trainer.cell, tokens), trainer.wiring
    model = build_model(
        cell.model,
        attention_name=wiring.attention_name,
        max_positions=tokens,
        seed=cell.seed,
        device=device,  # its random numbers are other ones than a CPU's
    )
    whole = ModelWithLoss(model.train(), cell.loss, StepPhase())
    engine = ENGINES["ddp"](whole, (), cell, trainer.strategy.groups, device)
    loop = trainer_code(cell.trainer)
    return loop(cell, engine, trainer.strategy, wiring, open_data(cell, device), StepPhase(), whole.fed)
