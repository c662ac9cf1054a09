"""What counts as the code of a cell: every source that it may run, and nothing above it."""

import tomllib

import pytest

from bench.environment import ABOVE_CELLS, REPOSITORY, digest_of

SOURCES = {"cell/run.py": "a = 1", "config.py": "b = 2", "sweep/run.py": "c = 3"}


@pytest.fixture
def tree(tmp_path):
    """A package of three modules, and a figure for predictions."""
    for name, text in SOURCES.items():
        (tmp_path / "bench" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bench" / name).write_text(text)
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "h100.yaml").write_text("peak: 1")
    return tmp_path


def digest(tree):
    return digest_of(tree / "bench", tree / "hardware")


@pytest.mark.parametrize(
    ("edited", "counts"),
    [("bench/cell/run.py", 1), ("bench/config.py", 1), ("hardware/h100.yaml", 1), ("bench/sweep/run.py", 0)],
)
def test_an_edit_counts_where_a_cell_may_run_it(tree, edited, counts):
    before = digest(tree)
    (tree / edited).write_text("something else")
    assert (digest(tree) != before) == bool(counts)


def test_a_module_that_is_new_counts_and_one_that_is_moved(tree):
    before = digest(tree)
    (tree / "bench" / "cell" / "new.py").touch()
    new = digest(tree)
    (tree / "bench" / "cell" / "new.py").rename(tree / "bench" / "new.py")
    assert len({before, new, digest(tree)}) == 3


def test_what_is_above_cells_is_what_the_layers_say():
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(each["layers"] for each in contracts if each["id"] == "bench")
    rooms = [layer.split(" | ") for layer in layers]
    above = rooms[: next(place for place, its in enumerate(rooms) if "cell" in its)]
    assert {name for its in above for name in its} == ABOVE_CELLS
