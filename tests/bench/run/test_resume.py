"""A sweep is gone on with by its own plan; what is no sweep, or another one, is left as it is."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from msgspec import to_builtins
from rich.console import Console

from bench.common.environment import describe
from bench.config import ConfigError, ExitCode, Resume
from bench.plan.plan import Plan, plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import StoredSweep, read_plan
from bench.run.cell.launcher import Launcher
from bench.run.progress import Progress
from bench.run.resume import kept_records
from bench.run.sweep import run_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.command import typed_here
from tests.support.records import as_record, make_record, read_lines

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


def test_records_that_another_sweep_wrote_since_the_plan_was_made_count(tmp_path):
    """Two plans of one new folder, of which one runs first; its report is written once, as nothing runs."""
    words = ["mode=predict", "hardware=h100_80gb", "cluster.world_size=8", f"sweep_dir={tmp_path / 'new'}"]
    raws = [make_raw(*words, f"seq_len={length}") for length in ("8k", "16k")]
    first, second = (plan(raws, TWO_CORES, single=False) for _ in range(2))
    quiet, reports = Progress(Console(quiet=True)), []
    ended = run_plan(first, Launcher(), quiet, write_report=lambda folder: reports.append(folder) or True)
    assert (ended, reports) == (ExitCode.OK, [tmp_path / "new"])
    with pytest.raises(ConfigError, match="contains records already"):
        run_plan(second, Launcher(), quiet, write_report=lambda _: True)


@pytest.mark.fault(18)
def test_alone_it_runs_what_is_missing_of_its_own_plan(half):
    before = planned(half)
    assert "sweep_dir=out: contains records already" in typed_here(half, *ASKED, GO_ON[1]).stderr
    listed = typed_here(half, *GO_ON, "--plan").stdout
    assert "plan of 4 cells, 2 of them done" in listed
    assert len(re.findall(r"^\w+ \S+ sp 8 .* done$", listed, re.MULTILINE)) == 2
    done = typed_here(half, *GO_ON)
    assert (done.returncode, "2 cells" in done.stdout) == (0, True), done.stderr
    records = read_lines(half / "out" / "records.jsonl")
    assert sorted((r["config"]["strategy"], r["config"]["seq_len"]) for r in records) == [
        (strategy, length) for strategy in ("ring", "ulysses") for length in (8192, 16384)
    ]
    assert {(r["provenance"], r["config"]["env.NCCL_DEBUG"]) for r in records} == {("predicted", "WARN")}
    assert planned(half) == before


def test_a_part_of_it_does_not_replace_its_plan(half):
    before = planned(half)
    for more in (["--plan"], []):
        done = typed_here(half, *ASKED, "seq_len=8k,2k", "env.NCCL_DEBUG=WARN", *GO_ON, *more)
        assert done.returncode == 0, done.stderr
        assert re.search(
            r"^2 cells \(.*16k sp 8.*\): only in the folder's earlier sweep", done.stdout, re.MULTILINE
        )
        assert re.search(r"^2 cells \(.* 2k sp 8.*\): new to the folder", done.stdout, re.MULTILINE)
    assert planned(half) == before


def test_words_of_another_sweep_are_refused(half):
    done = typed_here(half, *ASKED, "seq_len=2k", "env.NCCL_DEBUG=WARN", *GO_ON)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Only there: 4 cells (ulysses 8k sp 8, ring 8k sp 8, ...); only in this request: 2" in done.stderr
    assert len(read_lines(half / "out" / "records.jsonl")) == 2


@pytest.mark.parametrize("words", [(), ASKED])
def test_a_folder_that_is_no_sweep_is_refused_and_stays_as_it_is(tmp_path, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    done = typed_here(tmp_path, *words, *GO_ON)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "sweep_dir=out holds no sweep" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("content", ["argv: [", "argv: [1]\ncells: []\n", "\x00"])
def test_a_plan_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"out/config\.yaml: is no sweep's plan \(.*\); add the words"):
        read_plan(tmp_path / "out")


OTHER_COMMIT = {"git_commit": "0" * 40}


@pytest.mark.fault(19)
def test_records_of_another_commit_are_kept_by_resume_any_alone_and_stay_in_the_file(half):
    path = half / "out" / "records.jsonl"
    records = read_lines(path)
    for record in records:
        record["environment"] |= OTHER_COMMIT
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for words in (("--plan",), ()):
        done = typed_here(half, *GO_ON[1:], "resume=any", *words)
        assert done.returncode == 0, done.stderr
        assert "2 records of other code (0000000-" in done.stdout
        assert "): kept, as resume=any asks" in done.stdout
    assert len(read_lines(path)) == 4
    done = typed_here(half, *GO_ON)
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stdout.splitlines() if "other code" in line)
    assert said.startswith("2 records of other code (")
    assert said.endswith("): those cells run again; resume=any keeps them")
    records = read_lines(path)
    assert len(records) == 6
    assert len({record["cell_id"] for record in records[2:]}) == 4
    assert typed_here(half, *GO_ON).stdout.startswith("nothing is missing")


def kept(cell, *environments, **changes):
    """What is kept of records of this cell from these environments, with some of their values changed."""
    provenance = "predicted" if cell.mode == "predict" else "measured"
    sound = make_record(cell_id=cell.cell_id, config=cell.flat(), provenance=provenance)
    records = [as_record({**sound, "environment": each, **changes}) for each in environments]
    return kept_records(
        Plan((PlannedCell(cell, 0, 0),), TWO_CORES, Path(), StoredSweep(), Resume.MATCHING), records
    )


HERE = to_builtins(describe({}))
ELSEWHERE = {
    "code": HERE | OTHER_COMMIT,
    "code, by an edit": HERE | {"sources": "0" * 12},
    "device": HERE | {"device_name": "another"},
    "torch": HERE | {"packages": HERE["packages"] | {"torch": "1.0"}},
    "deepspeed": HERE | {"packages": HERE["packages"] | {"deepspeed": "0.1"}},
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_measurement_is_reused_only_where_all_that_made_it_is_the_same(what):
    found = kept(make_cell("engine=zero3"), ELSEWHERE[what])
    assert (len(found.records), len(found.lines)) == (0, 1)
    assert found.lines[0].startswith(f"1 record of other {what.partition(',')[0]} (")
    assert kept(make_cell("engine=zero3"), HERE).lines == ()


def test_what_a_cell_does_not_use_does_not_make_its_record_stale():
    assert len(kept(make_cell("engine=ddp"), ELSEWHERE["deepspeed"]).records) == 1
    predicted = make_cell("mode=predict", "hardware=h100_80gb", "cluster.world_size=8")
    for what in ("device", "torch"):
        assert len(kept(predicted, ELSEWHERE[what]).records) == 1
    assert len(kept(predicted, ELSEWHERE["code"]).records) == 0


def test_a_record_that_does_not_say_what_made_it_is_not_reused_and_a_failure_runs_again_without_a_word():
    for unsaid in (("git_commit", "sources"), ("device_name",)):
        says = HERE | dict.fromkeys(unsaid)
        assert kept(make_cell(), says).records == []
    assert kept(make_cell(), ELSEWHERE["code"], status="crashed").lines == ()


def test_of_a_cell_that_ran_again_the_newest_record_counts():
    """Code that comes back does not bring its records back: every analysis reads the later ones."""
    assert kept(make_cell(), HERE, ELSEWHERE["code"]).records == []
    assert len(kept(make_cell(), ELSEWHERE["code"], HERE).records) == 1


def test_of_a_cell_that_a_search_has_not_come_to_yet_only_a_record_of_this_code_counts():
    for environment, counts in ((HERE, 1), (ELSEWHERE["code"], 0), (ELSEWHERE["torch"], 0)):
        assert len(kept(make_cell(), environment, cell_id="of another cell").records) == counts
