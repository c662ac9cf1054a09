"""Batches of a step do not depend on the sharding, and hold the text of the given path."""

import pytest
import torch

from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import batch_digest, open_data
from tests.support.cells import make_cell

CPU = torch.device("cpu")


def test_labels_are_next_tokens_across_the_end_of_the_text():
    data = open_data(make_cell("seq_len=96k", "strategy=local"), CPU)
    batch = data.micro_batch(step=4, micro_step=0, data_rank=0, length=98304)
    following = data.micro_batch(step=5, micro_step=0, data_rank=0, length=98304)
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])
    assert batch.labels[0, -1] == following.input_ids[0, 0]


def test_prompt_tokens_do_not_count_in_the_loss():
    data = open_data(make_cell("seq_len=64", "data.prompt_tokens=10"), CPU)
    labels = data.micro_batch(0, 0, 0, 64).labels
    assert (labels == IGNORED_LABEL).sum() == 10
    assert (labels[:, :10] == IGNORED_LABEL).all()


@pytest.mark.parametrize("change", ["token", "position", "label", "twice", "missing"])
def test_digest_changes_with_every_change_of_the_batch(change):
    data = open_data(make_cell("seq_len=64"), CPU)
    batch = data.micro_batch(0, 0, 0, 64)
    parts = [batch.input_ids, batch.labels, batch.position_ids.contiguous()]
    changes = {
        "token": lambda p: [p[0].index_fill(1, torch.tensor([7]), 0), *p[1:]],
        "label": lambda p: [p[0], p[1].index_fill(1, torch.tensor([7]), 0), p[2]],
        "position": lambda p: [*p[:2], p[2].roll(1, dims=1)],
        "twice": lambda p: [torch.cat([x, x[:, :1]], dim=1) for x in p],
        "missing": lambda p: [x[:, 1:] for x in p],
    }
    assert batch_digest(*changes[change](parts)) != batch_digest(*parts)


@pytest.mark.parametrize("texts", [("first", "second"), ("one\ntext", "", "b")])
def test_documents_that_are_not_packed_have_blank_lines_between(tmp_path, texts):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    whole = "\n\n".join(texts)
    data = open_data(make_cell(f"data.path={tmp_path}", "seq_len=64"), CPU)
    tokens = data.micro_batch(0, 0, 0, 64).input_ids[0].tolist()
    assert bytes(tokens).decode() == (whole * 64)[:64]
