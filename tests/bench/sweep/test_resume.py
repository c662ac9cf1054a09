"""A sweep is gone on with by its own plan; what is no sweep, or another one, is left as it is."""

import shutil

import pytest
import yaml

from bench.config import ConfigError
from bench.store import read_records
from bench.sweep.stored_plan import read_plan
from tests.command import typed_here

ASKED = ("-m", "mode=predict", "hardware=h100_80gb", "cluster.world_size=8", "strategy=ulysses,ring")
GO_ON = ("resume=true", "sweep_dir=out")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Two of the four cells of a sweep of predictions, which starts no ranks."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.write_report", lambda _: True)
        words = ("seq_len=8k,16k", "env.NCCL_DEBUG=WARN", "sweep_dir=out")
        assert typed_here(folder, *ASKED, *words).returncode == 0
    lines = (folder / "out" / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "out" / "records.jsonl").write_text("".join(lines[:2]))
    return folder


@pytest.fixture
def half(begun, tmp_path, monkeypatch):
    """A copy of it."""
    monkeypatch.setattr("analysis.report.write_report", lambda _: True)
    shutil.copytree(begun / "out", tmp_path / "out")
    return tmp_path


def planned(folder):
    return yaml.safe_load((folder / "out" / "config.yaml").read_text())["cells"]


@pytest.mark.fault(18)
def test_alone_it_runs_what_is_missing_of_its_own_plan(half):
    before = planned(half)
    done = typed_here(half, *GO_ON)
    assert (done.returncode, "2 cells" in done.stdout) == (0, True), done.stderr
    records = read_records(half / "out" / "records.jsonl")
    assert sorted((r["config"]["strategy"], r["config"]["seq_len"]) for r in records) == [
        (strategy, length) for strategy in ("ring", "ulysses") for length in (8192, 16384)
    ]
    assert all(record["config"]["env.NCCL_DEBUG"] == "WARN" for record in records)
    assert planned(half) == before


def test_a_part_of_it_does_not_replace_its_plan(half):
    before = planned(half)
    done = typed_here(half, *ASKED, "seq_len=8k", "env.NCCL_DEBUG=WARN", *GO_ON)
    assert done.returncode == 0, done.stderr
    assert planned(half) == before


OTHERS = {
    "another length": (
        [*ASKED, "seq_len=2k", "env.NCCL_DEBUG=WARN"],
        "with seq_len=8192 in place of seq_len=2048",
    ),
    "another environment": (
        [*ASKED, "seq_len=8k,16k"],
        "env.NCCL_DEBUG=WARN in place of env.NCCL_DEBUG=null",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_words_of_another_sweep_are_refused(half, case):
    words, said = OTHERS[case]
    done = typed_here(half, *words, *GO_ON)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert len(read_records(half / "out" / "records.jsonl")) == 2


@pytest.mark.parametrize("words", [(), ASKED])
def test_a_folder_that_is_no_sweep_is_refused_and_stays_as_it_is(tmp_path, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    done = typed_here(tmp_path, *words, *GO_ON)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "sweep_dir=out holds no sweep" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letter.txt"]


def test_a_line_that_is_no_record_is_named_before_anything_runs(half):
    path = half / "out" / "records.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(f'{first}{{"schema_version":3}}\n{second}')
    done = typed_here(half, *GO_ON)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert "records.jsonl:2: not a record: Object missing required field `cell_id`" in done.stderr
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("content", ["argv: [", "argv: run_sweep.py", "argv: [1]\ncells: []\n", "\x00"])
def test_a_plan_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"out/config\.yaml: is no sweep's plan \(.*\); add the words"):
        read_plan(tmp_path / "out")
