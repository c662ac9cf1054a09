"""Cells that combine many choices pass every gate; other tests try each choice alone."""

import pytest

from tests.support.cells import counted_and_expected_bytes, run_cell, tiny_cell

COMBINATIONS = {
    "padded documents under FSDP2, SGD on a falling rate": (
        "strategy=ring", "seq_len=250", "pad=true", "data=synthetic", "data.packing=documents",
        "engine=fsdp2",
        "optimizer=sgd", "optimizer.schedule=cosine", "optimizer.max_grad_norm=0",
    ),
    "ALST's switches under ZeRO-3": (
        "strategy=deepspeed_ulysses", "engine=zero3", "tiled_mlp=true", "checkpointing=true", "optimizer=sgd",
        "offload.activations=true", "offload.optimizer=true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("choices", COMBINATIONS)
def test_combined_choices_pass_every_gate(launcher, tmp_path, choices):
    words = COMBINATIONS[choices]
    cell = tiny_cell("cluster.world_size=2", "dtype=fp32", "measure.steps=2", *words)
    record, _ = run_cell(launcher, cell, tmp_path)
    assert (record.status, record.reason) == ("ok", None)
    assert record.timing.tokens_per_step == cell.seq_len
    counted, computed = counted_and_expected_bytes(record)
    assert counted == computed
