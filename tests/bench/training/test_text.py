"""Documents of a file and of a folder; a file that is not text is refused by its place."""

import json
import sys

import pytest

from bench.config import ConfigError
from bench.training.text import read_beginning, read_documents
from tests.support.cells import make_cell
from tests.support.text_data import write_rows, write_saved_dataset


def documents(path):
    return [*read_documents(str(path), None)]


def test_documents_of_a_file_of_a_folder_and_of_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("first\r\nline")
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "c").mkdir()
    write_rows(tmp_path / "c" / "c.jsonl", [{"text": "x"}, {"text": "y"}])
    texts = {path: documents(tmp_path / path) for path in ("a.txt", "c", "c/c.jsonl", ".")}
    assert texts == {"a.txt": ["first\nline"], "c": ["x", "y"], "c/c.jsonl": ["x", "y"], ".": ["x", "y"]}
    (tmp_path / "c" / "c.jsonl").unlink()
    assert documents(tmp_path) == ["first\nline", "second"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables_are_read_row_by_row_from_a_file_or_folder(tmp_path, suffix):
    (tmp_path / "README.md").write_text("about")
    write_rows(tmp_path / f"b{suffix}", [{"id": 3, "text": "d"}])
    write_rows(tmp_path / f"a{suffix}", [{"id": i, "text": text} for i, text in enumerate("abc")])
    assert documents(tmp_path) == ["a", "b", "c", "d"]
    assert documents(tmp_path / f"a{suffix}") == ["a", "b", "c"]
    assert make_cell(f"data.path={tmp_path}").data.path == str(tmp_path)


@pytest.mark.parametrize("shards", [["ab", "c"], ["a", "b", "c"]])
def test_saved_dataset_is_read_without_its_caches(tmp_path, shards):
    write_saved_dataset(tmp_path, [[{"text": text} for text in shard] for shard in shards])
    assert documents(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows"])
@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\u2029"])
def test_json_lines_end_at_newlines_alone(tmp_path, name, separator):
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in (f"a{separator}b", "c")]
    (tmp_path / name).write_text("\n" + "\n".join(rows), encoding="utf-8")
    assert documents(tmp_path / name) == [f"a{separator}b", "c"]


@pytest.mark.parametrize("indent", [None, 2])
def test_rows_of_a_json_array_are_documents(tmp_path, indent):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=indent))
    assert documents(path) == ["a", "b"]
    path.write_text(json.dumps({"rows": []}, indent=2))
    with pytest.raises(ConfigError, match="is neither an array of rows nor JSON lines"):
        documents(path)
    path.write_text(json.dumps([{"text": "a"}, {"instruction": "b"}]))
    with pytest.raises(ConfigError, match=r"rows\.json row 1: has no key `text`.*keys: instruction"):
        documents(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b" \n"])
def test_file_without_text_is_refused(tmp_path, content):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.path="):
        read_beginning(str(path), None)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("b.txt", b"text\n" * 5000 + b"caf\xe9", r"b\.txt: byte 25003"),
        ("b.md", b"\xff", r"b\.md: byte 0"),
        ("b.jsonl", b'{"text": "a"}\n' * 9000 + b'{"text": "caf\xe9"}\n', r"b\.jsonl:9001: byte 126013"),
        ("b", b'{"text": "a"}\n\xff\n', r"b:2: byte 14"),
    ],
    ids=["late", "first", "late_row", "row"],
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_bytes_that_are_not_utf8_are_refused_by_place(tmp_path, name, content, place, is_folder):
    if is_folder and name == "b":
        name, place = "b.txt", place.replace("b:", "b.txt:")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{place} is not UTF-8"):
        read_beginning(str(tmp_path if is_folder else tmp_path / name), None)


@pytest.mark.parametrize("name", ["train.parquet", "data-00000-of-00001.arrow"])
def test_table_that_pyarrow_cannot_read_is_refused(tmp_path, name):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"PAR1" * 10)
    with pytest.raises(ConfigError, match=rf"{name} row 0: \w+"):
        read_beginning(str(tmp_path), None)


@pytest.mark.parametrize("name", ["train.parquet", "data-00000-of-00001.arrow"])
def test_tables_without_pyarrow_are_refused_with_its_name(tmp_path, name, monkeypatch):
    (tmp_path / name).write_bytes(b"")
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{name} needs the package pyarrow; .*pip install pyarrow$"):
        read_beginning(str(tmp_path), None)
