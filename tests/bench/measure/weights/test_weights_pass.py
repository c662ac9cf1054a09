"""A cell that trains on generated questions leaves a checkpoint that a later cell can score."""

import torch
from transformers import AutoModelForCausalLM

from bench.measure.weights.section import FOLDER_NAME
from bench.training.models import build_model
from tests.support.cells import make_cell, run_cell

WORDS = (
    "data=tasks", "seq_len=128", "batch=4", "strategy=ring", "engine=ddp", "dtype=fp32",
    "measure.weights=true",
    "measure.steps=3", "measure.min_timed_steps=3", "measure.warmup_steps=0", "measure.trace=false",
    "optimizer.learning_rate=1e-2",
)  # fmt: skip


def test_checkpoint_has_the_trained_weights_and_length(launcher, tmp_path):
    cell = make_cell(*WORDS)
    record, folder = run_cell(launcher, cell, tmp_path, without=("parity", "objective", "full_length"))
    assert record.status == "ok", record.reason
    answers = 4 * 4  # queries of each of four sequences, with one token each
    assert all(0 < valid <= answers for valid in record.losses.valid_tokens)
    path = folder / FOLDER_NAME.format(strategy="ring")
    trained = AutoModelForCausalLM.from_pretrained(path)
    first = build_model(cell.model, attention_name="sdpa", max_positions=128, seed=cell.seed)
    moved = [
        float((new - old).abs().max())
        for new, old in zip(trained.parameters(), first.parameters(), strict=True)
    ]
    assert min(moved) > 1e-3
    scored = make_cell("model=checkpoint", f"model.path={path}", "seq_len=256", "model.rope_scaling=yarn")
    assert (scored.model.name, scored.model.trained_len) == ("trained_ring", 128)
    assert scored.model.rope_scaling == "yarn"
    longer = (*WORDS, "model=checkpoint", f"model.path={path}", "seq_len=256", "measure.steps=1")
    next_cell = make_cell(*longer, "measure.min_timed_steps=1")
    record, folder = run_cell(launcher, next_cell, tmp_path, without=("parity", "objective", "full_length"))
    assert record.status == "ok", record.reason
    again = make_cell("model=checkpoint", f"model.path={folder / 'trained_ring'}")
    assert again.model.trained_len == 256
    assert torch.isfinite(trained(input_ids=torch.arange(16)[None]).logits).all()
