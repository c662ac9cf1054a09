"""Batches of a step do not depend on the sharding, and text is read from the given path."""

import json

import pytest
import torch

from bench.config import ConfigError
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import batch_digest, open_data
from bench.training.text import read_beginning, read_text
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


def test_read_text_from_a_file_a_folder_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("x", "y")))
    texts = {
        path: read_text(make_cell(f"data.path={tmp_path / path}").data)
        for path in ("a.txt", "c", "c/c.jsonl")
    }
    assert texts == {"a.txt": "first", "c": "x\n\ny", "c/c.jsonl": "x\n\ny"}
    (tmp_path / "c" / "c.jsonl").unlink()
    assert read_text(make_cell(f"data.path={tmp_path}").data) == "first\n\nsecond"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows"])
@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\u2029"])
def test_json_lines_end_at_newlines_alone(tmp_path, name, separator):
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in (f"a{separator}b", "c")]
    (tmp_path / name).write_text("\n" + "\n".join(rows), encoding="utf-8")
    assert read_text(make_cell(f"data.path={tmp_path / name}").data) == f"a{separator}b\n\nc"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (r'{"text": "a \ud83d"}', "surrogate"),
        (r'{"text": "\ude00 b"}', "surrogate"),
        ('{"content": "a", "id": 1}', "content, id"),
        ('{"messages": []}', "messages, a chat that a tokenizer's apply_chat_template"),
        ('{"id": 1, "messages": []}', "id, messages, a chat that"),
        ('{"text": 1}', "not a string"),
        ('{"text": "a', "Invalid control character"),
    ],
)
def test_a_bad_row_far_down_is_refused_by_line(tmp_path, row, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' * 9000 + row + "\n")
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:9001: .*{reason}"):
        read_beginning(str(path))


@pytest.mark.parametrize("other", ["README.md", "notes.txt"])
def test_a_folder_of_json_lines_and_text_is_refused(tmp_path, other):
    (tmp_path / "part-0.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / other).write_text("about")
    with pytest.raises(ConfigError, match=rf"part-0\.jsonl and {other}"):
        read_beginning(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b" \n"])
def test_read_text_refuses_a_file_without_text(tmp_path, content):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.path="):
        read_text(make_cell(f"data.path={path}").data)


@pytest.mark.parametrize("name", ["train.parquet", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_tables_are_refused_with_a_way_out(tmp_path, name, is_folder):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=rf"{name} is a table; write it as JSON lines"):
        read_beginning(str(tmp_path if is_folder else tmp_path / name))
