"""`experiment=memory_fit`: the page that ships with the project is the one that its command writes."""

import csv
from collections import Counter

import pytest

from bench.config import ConfigError
from bench.environment import REPOSITORY
from bench.experiments.memory_fit import room_of
from bench.experiments.memory_fit_table import COMMAND
from bench.request.hardware import known_hardware
from tests.cells import make_cell
from tests.command import typed_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    done = typed_here(folder, *COMMAND.split()[2:])
    assert done.returncode == 0, done.stderr
    return folder / "docs"


def test_the_page_is_what_its_command_writes(folder):
    assert (folder / "memory_fit.md").read_text() == (REPOSITORY / "docs" / "memory_fit.md").read_text()


def test_it_is_about_every_device_and_what_is_bold_does_not_fit(folder):
    with (folder / "memory_fit.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert {row["hardware"] for row in rows} == {*known_hardware()}
    assert {row["world_size"] for row in rows} == {"1", "4", "8"}
    found = Counter(row["fit"] for row in rows)
    assert found.keys() == {"fits", "undecided", "out_of_memory"}
    assert found["fits"] > len(rows) / 2
    for row in rows:
        low, expected, high = (int(row[f"needed_{end}bytes"]) for end in ("low_", "", "high_"))
        assert low < expected < high
    page = (folder / "memory_fit.md").read_text()
    shared = {row["usable_bytes"]: row["hardware"] for row in rows}
    one_of_each = [row for row in rows if shared[row["usable_bytes"]] == row["hardware"]]
    said = Counter(row["fit"] for row in one_of_each)
    assert page.count("**") == 2 * (said["out_of_memory"] + 1)  # and the word that says what it means
    assert page.count("? |") == said["undecided"]


def test_words_narrow_it(tmp_path):
    words = ("hardware=h200_141gb", "cluster.world_size=2", "strategy=ring", "seq_len=1m", "model=qwen3_8b")
    done = typed_here(tmp_path, "experiment=memory_fit", *words, "tiled_mlp=true", "sweep_dir=o")
    assert done.returncode == 0
    (row,) = csv.DictReader((tmp_path / "o" / "memory_fit.csv").read_text().splitlines())
    assert (row["hardware"], row["world_size"], row["seq_len"]) == ("h200_141gb", "2", str(2**20))
    assert row["tiled_mlp"] == "True"
    assert "ring | on, tiled_mlp |" in done.stdout


@pytest.mark.parametrize("words", [("workload=attention", "cluster.memory_limit_gib=1"), ()])
def test_what_is_not_estimated_is_refused(words):
    with pytest.raises(ConfigError, match="leave out workload and cluster"):
        room_of(make_cell(*words))
