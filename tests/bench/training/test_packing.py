"""Packed sequences: the starts and ends of documents, the labels that count, and padding."""

import json

import pytest
import torch

from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import SOURCES, open_data
from bench.training.packing import PackedText, random_documents, random_ends
from bench.training.text import read_documents
from tests.support.cells import make_cell

CPU = torch.device("cpu")
PACKED = ("strategy=local", "data.packing=documents")
TEXTS = ("abcdefgh", "i", "jklm", "nopqrstuvwxyz")


def packed_batch(*words, seq_len=96, length=None):
    cell = make_cell(f"seq_len={seq_len}", *PACKED, *words)
    return open_data(cell, CPU).micro_batch(0, 0, 0, length or cell.padded_len)


def test_packed_samples_start_with_a_document_and_cut_the_last():
    packed = PackedText([8, 1, 4, 13], first_document=0, seq_len=10)
    samples = [(packed.start(sample) % 26, packed.sample_ends(sample, 10)) for sample in range(4)]
    assert samples == [(0, (8, 9, 10)), (13, (10,)), (0, (8, 9, 10)), (13, (10,))]
    exact_fit = PackedText([8, 1, 4, 13], first_document=2, seq_len=13)
    assert [exact_fit.start(sample) for sample in range(4)] == [9, 26, 39, 52]
    assert packed.sample_ends(0, 9) == (8, 9)
    assert packed.sample_ends(1, 26) == (13, 21, 22, 26)


def test_json_lines_are_packed_document_by_document(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = f"data.path={path}", "batch=2"
    assert [*read_documents(str(path), None)] == [*TEXTS]
    batch = packed_batch(*words, seq_len=10)
    assert [bytes(row.tolist()).decode() for row in batch.input_ids] == ["abcdefghij", "nopqrstuvw"]
    assert batch.documents.ends == ((8, 9, 10), (10,))
    assert batch.position_ids.tolist() == [[*range(8), 0, 0], [*range(10)]]
    # The document that is cut continues, so its last token here has a label; that of a complete one has none.
    last = [int(row[-1]) for row in batch.labels]
    assert bytes(last).decode() == "kx"
    assert [(row == IGNORED_LABEL).nonzero()[:, 0].tolist() for row in batch.labels] == [[7, 8], []]
    # The last token of a document that ends with the sequence has none either.
    assert packed_batch(f"data.path={path}", seq_len=9).labels[0, -1] == IGNORED_LABEL


@pytest.mark.parametrize("source", sorted({*SOURCES} - {"tasks"}))  # a shorter question is another one
def test_shorter_step_has_the_beginning_of_the_same_sequences(source):
    whole, part = (packed_batch(f"data={source}", "batch=2", length=length) for length in (96, 40))
    assert torch.equal(whole.input_ids[:, :40], part.input_ids)
    assert torch.equal(whole.position_ids[:, :40], part.position_ids)
    assert torch.equal(whole.labels[:, :40], part.labels)


def test_drawn_documents_differ_and_include_a_single_token():
    ends = random_documents(8, 64).ends
    assert len({*ends}) == 8
    assert all(second - first == 1 for first, second, *_ in ends)
    assert all(random_ends(0, row, 64, 20)[:-1] == tuple(e for e in ends[row] if e < 20) for row in range(8))


def test_prompt_tokens_are_those_of_every_document():
    batch = packed_batch("data=synthetic", "data.prompt_tokens=3")
    counted = batch.labels != IGNORED_LABEL
    assert counted.any()
    assert (batch.position_ids[counted] >= 3).all()


def test_padding_is_a_separate_document_that_does_not_count():
    words = ("data=synthetic", "data.packing=documents", "cluster.world_size=4", "pad=true")
    cell = make_cell("seq_len=250", "strategy=ring", *words)
    assert (cell.padding, cell.padded_len, cell.shard_len, cell.tokens_per_step) == (6, 256, 64, 250)
    padded = open_data(cell, CPU).micro_batch(0, 0, 0, 256)
    alone = packed_batch("data=synthetic", seq_len=250)
    assert padded.documents.ends[0] == (*alone.documents.ends[0], 256)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(padded, name)[:, :250], getattr(alone, name))
    assert (padded.labels[:, 250:] == IGNORED_LABEL).all()


def test_padding_without_packing_continues_the_sequence():
    cell = make_cell("seq_len=250", "strategy=ring", "cluster.world_size=4", "pad=true")
    batch = open_data(cell, CPU).micro_batch(0, 0, 0, 256)
    assert batch.documents is None
    assert batch.position_ids[0].tolist() == [*range(256)]
    assert (batch.labels[:, 249] != IGNORED_LABEL).all()
    assert (batch.labels[:, 250:] == IGNORED_LABEL).all()
