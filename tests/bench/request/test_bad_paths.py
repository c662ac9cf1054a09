"""Unusable files are refused while planning, in one line and without blocking."""

import os

import pytest

from bench.config import ConfigError
from tests.support.cells import make_cell
from tests.support.text_data import write_tokenizer


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path / "pipe.txt"


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer"])
@pytest.mark.parametrize("place", ["pipe", "/dev/zero"])
def test_pipe_or_device_as_path_is_refused(pipe, key, place):
    with pytest.raises(ConfigError, match="is a device, pipe or socket; name a file or folder"):
        make_cell(f"{key}={pipe if place == 'pipe' else place}")


def test_folder_that_contains_a_pipe_is_refused(pipe, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"pipe\.txt is no file that can be read"):
        make_cell(f"data.path={tmp_path}")
    pipe.rename(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"no file config\.json"):
        make_cell("model=checkpoint", f"model.path={tmp_path}")


def test_unusable_tokenizer_is_refused_while_planning(tmp_path):
    text, good, large, broken = (tmp_path / name for name in ("text.txt", "good", "large", "broken"))
    text.write_text("to be or not to be")
    for folder in (good, large, broken):
        folder.mkdir()
    write_tokenizer(good, ["?", "to", "be"])
    write_tokenizer(large, [*map(str, range(5000)), "to"])
    (broken / "tokenizer.json").write_text('{"a":')
    assert make_cell(f"data.path={text}", f"data.tokenizer={good}").data.tokenizer == str(good)
    with pytest.raises(ConfigError, match="gives ids up to 5000, but the model's vocabulary has"):
        make_cell(f"data.path={text}", f"data.tokenizer={large}")
    for folder in (broken, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be used \(.+\); name a folder with a tokenizer\.json"):
            make_cell(f"data.path={text}", f"data.tokenizer={folder}")
