"""Files of a folder that are trained on, and those that are left out."""

import json

import pytest

from bench.config import ConfigError
from bench.training.text_files import files_line, text_files
from tests.support.text_data import write_saved_dataset


def write_names(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("a.jsonl",), r"1 of 1 files are trained on (*.jsonl)"),
        (("a.jsonl", "b/c.jsonl", "README.md"), "2 of 3 files are trained on (*.jsonl); left out: README.md"),
        (("a.md", "b.txt", "c.csv"), "2 of 3 files are trained on (*.md *.txt); left out: c.csv"),
        (
            ("a.parquet", "b.md", "c.csv", "d.gz", "e/e.gz", "f.gz"),
            "1 of 6 files are trained on (*.parquet); left out: b.md, c.csv, d.gz and 2 more",
        ),
    ],
)
def test_line_names_what_is_trained_on_and_what_is_left_out(tmp_path, names, line):
    write_names(tmp_path, *names)
    assert files_line(str(tmp_path)) == f"data.path={tmp_path}: {line}"
    assert files_line(str(tmp_path / names[0])) is None


def test_line_of_a_saved_dataset_leaves_out_caches(tmp_path):
    write_saved_dataset(tmp_path, [[{"text": "a"}], [{"text": "b"}]])
    left_out = "cache-6046094acb57897c.arrow, dataset_info.json, state.json"
    line = f"2 of 5 files are trained on (*.arrow); left out: {left_out}"
    assert files_line(str(tmp_path)) == f"data.path={tmp_path}: {line}"


@pytest.mark.parametrize("names", [("a.jsonl", "b.parquet"), ("a.arrow", "b/b.jsonl", "README.md")])
def test_folder_with_rows_in_two_formats_is_refused(tmp_path, names):
    write_names(tmp_path, *names)
    with pytest.raises(ConfigError, match=r"mixes \*\.\w+ and \*\.\w+ files; name one file"):
        text_files(str(tmp_path))


@pytest.mark.parametrize("splits", [["train"], ["train", "test"]])
def test_folder_with_several_splits_is_refused(tmp_path, splits):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    names = " or ".join(str(tmp_path / split) for split in splits)
    with pytest.raises(ConfigError, match=f"name one split: {names}$"):
        text_files(str(tmp_path))
