"""A small model with the attention of a cell's model."""

from __future__ import annotations

from dataclasses import replace

from bench.config import DataConfig, RunConfig

CUT_LAYERS = 2
CUT_VOCABULARY = 512


def cut_cell(cell: RunConfig, seq_len: int) -> RunConfig:
    """Return the cell with a two-layer model, a small vocabulary, a narrow MLP and random weights."""
    model = replace(
        cell.model,
        path=None,
        num_layers=CUT_LAYERS,
        vocab_size=min(cell.model.vocab_size, CUT_VOCABULARY),
        intermediate_size=min(cell.model.intermediate_size, cell.model.hidden_size),
    )
    data = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0, packing=cell.data.packing)
    return replace(cell, model=model, data=data, seq_len=seq_len, padding=0, checkpointing=False)
