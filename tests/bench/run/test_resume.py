"""`resume=true` continues a sweep by its stored plan; other folders are refused and left unchanged."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from msgspec import to_builtins
from rich.console import Console

from bench.common.environment import describe_environment
from bench.config import ConfigError, ExitCode, Resume
from bench.plan.plan import Plan, plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import StoredSweep, read_plan
from bench.run.cell.launcher import Launcher
from bench.run.progress import Progress
from bench.run.resume import kept_records
from bench.run.sweep import run_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.command import run_command_here
from tests.support.records import as_record, make_record, read_lines

REQUEST = ("-m", "mode=predict", "hardware=h100_80gb", "cluster.world_size=8", "strategy=ulysses,ring")
RESUME = ("resume=true", "sweep_dir=out")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return a folder with a sweep of four predictions, of which two have records."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.write_report", lambda _: True)
        words = ("seq_len=8k,16k", "env.NCCL_DEBUG=WARN", "sweep_dir=out")
        assert run_command_here(folder, *REQUEST, *words).returncode == 0
    lines = (folder / "out" / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "out" / "records.jsonl").write_text("".join(lines[:2]))
    return folder


@pytest.fixture
def half(begun, tmp_path, monkeypatch):
    """Return a copy of the folder of `begun`."""
    monkeypatch.setattr("analysis.report.write_report", lambda _: True)
    shutil.copytree(begun / "out", tmp_path / "out")
    return tmp_path


def planned(folder):
    return yaml.safe_load((folder / "out" / "config.yaml").read_text())["cells"]


def test_records_written_after_planning_count(tmp_path):
    """Two plans have one new folder, and the second runs after the first."""
    words = ["mode=predict", "hardware=h100_80gb", "cluster.world_size=8", f"sweep_dir={tmp_path / 'new'}"]
    raws = [make_raw(*words, f"seq_len={length}") for length in ("8k", "16k")]
    first, second = (plan(raws, TWO_CORES, single=False) for _ in range(2))
    quiet, reports = Progress(Console(quiet=True)), []
    ended = run_plan(first, Launcher(), quiet, write_report=lambda folder: reports.append(folder) or True)
    assert (ended, reports) == (ExitCode.OK, [tmp_path / "new"])
    with pytest.raises(ConfigError, match="contains records already"):
        run_plan(second, Launcher(), quiet, write_report=lambda _: True)


@pytest.mark.fault(18)
def test_resume_alone_runs_the_missing_cells_of_the_stored_plan(half):
    before = planned(half)
    assert "sweep_dir=out: contains records already" in run_command_here(half, *REQUEST, RESUME[1]).stderr
    listed = run_command_here(half, *RESUME, "--plan").stdout
    assert "plan of 4 cells, 2 of them done" in listed
    assert len(re.findall(r"^\w+ \S+ sp 8 .* done$", listed, re.MULTILINE)) == 2
    done = run_command_here(half, *RESUME)
    assert (done.returncode, "2 cells" in done.stdout) == (0, True), done.stderr
    records = read_lines(half / "out" / "records.jsonl")
    assert sorted((r["config"]["strategy"], r["config"]["seq_len"]) for r in records) == [
        (strategy, length) for strategy in ("ring", "ulysses") for length in (8192, 16384)
    ]
    assert {(r["provenance"], r["config"]["env.NCCL_DEBUG"]) for r in records} == {("predicted", "WARN")}
    assert planned(half) == before


def test_resume_of_a_part_keeps_the_stored_plan(half):
    before = planned(half)
    for more in (["--plan"], []):
        done = run_command_here(half, *REQUEST, "seq_len=8k,2k", "env.NCCL_DEBUG=WARN", *RESUME, *more)
        assert done.returncode == 0, done.stderr
        assert re.search(
            r"^2 cells \(.*16k sp 8.*\): only in the folder's earlier sweep", done.stdout, re.MULTILINE
        )
        assert re.search(r"^2 cells \(.* 2k sp 8.*\): new in this request", done.stdout, re.MULTILINE)
    assert planned(half) == before


def test_resume_refuses_the_words_of_another_sweep(half):
    done = run_command_here(half, *REQUEST, "seq_len=2k", "env.NCCL_DEBUG=WARN", *RESUME)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Only in the folder: 4 cells (ulysses 8k sp 8, ring 8k sp 8, ...); only in this request: 2" in (
        done.stderr
    )
    assert len(read_lines(half / "out" / "records.jsonl")) == 2


@pytest.mark.parametrize("words", [(), REQUEST])
def test_resume_refuses_a_folder_without_a_sweep(tmp_path, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    done = run_command_here(tmp_path, *words, *RESUME)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "sweep_dir=out contains no sweep" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("content", ["argv: [", "argv: [1]\ncells: []\n", "\x00"])
def test_read_plan_names_a_plan_that_cannot_be_read(tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(content)
    with pytest.raises(
        ConfigError, match=r"out/config\.yaml: is not the plan of a sweep \(.*\); repeat the words"
    ):
        read_plan(tmp_path / "out")


OTHER_COMMIT = {"git_commit": "0" * 40}


@pytest.mark.fault(19)
def test_only_resume_any_keeps_records_of_another_commit(half):
    path = half / "out" / "records.jsonl"
    records = read_lines(path)
    for record in records:
        record["environment"] |= OTHER_COMMIT
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for words in (("--plan",), ()):
        done = run_command_here(half, *RESUME[1:], "resume=any", *words)
        assert done.returncode == 0, done.stderr
        assert "2 records of other code (0000000-" in done.stdout
        assert "): kept because of resume=any" in done.stdout
    assert len(read_lines(path)) == 4
    done = run_command_here(half, *RESUME)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "other code" in line)
    assert line.startswith("2 records of other code (")
    assert "): their cells run again; with resume=any" in line
    records = read_lines(path)
    assert len(records) == 6
    assert len({record["cell_id"] for record in records[2:]}) == 4
    assert run_command_here(half, *RESUME).stdout.startswith("nothing is missing")


def kept(cell, *environments, **changes):
    """Return the kept records of a cell that ran in these environments, with changed values."""
    provenance = "predicted" if cell.mode == "predict" else "measured"
    sound = make_record(cell_id=cell.cell_id, config=cell.flat(), provenance=provenance)
    records = [as_record({**sound, "environment": environment, **changes}) for environment in environments]
    return kept_records(
        Plan((PlannedCell(cell, 0, 0),), TWO_CORES, Path(), StoredSweep(), Resume.MATCHING), records
    )


HERE = to_builtins(describe_environment({}))
ELSEWHERE = {
    "code": HERE | OTHER_COMMIT,
    "code, by an edit": HERE | {"sources": "0" * 12},
    "device": HERE | {"device_name": "another"},
    "torch": HERE | {"packages": HERE["packages"] | {"torch": "1.0"}},
    "deepspeed": HERE | {"packages": HERE["packages"] | {"deepspeed": "0.1"}},
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_kept_records_have_the_origin_of_a_run_now(what):
    selected = kept(make_cell("engine=zero3"), ELSEWHERE[what])
    assert (len(selected.records), len(selected.lines)) == (0, 1)
    assert selected.lines[0].startswith(f"1 record of other {what.partition(',')[0]} (")
    assert kept(make_cell("engine=zero3"), HERE).lines == ()


def test_kept_records_may_differ_in_packages_the_cell_never_uses():
    assert len(kept(make_cell("engine=ddp"), ELSEWHERE["deepspeed"]).records) == 1
    predicted = make_cell("mode=predict", "hardware=h100_80gb", "cluster.world_size=8")
    for what in ("device", "torch"):
        assert len(kept(predicted, ELSEWHERE[what]).records) == 1
    assert len(kept(predicted, ELSEWHERE["code"]).records) == 0


def test_kept_records_need_an_origin_and_failures_need_no_line():
    for unknown in (("git_commit", "sources"), ("device_name",)):
        environment = HERE | dict.fromkeys(unknown)
        assert kept(make_cell(), environment).records == []
    assert kept(make_cell(), ELSEWHERE["code"], status="crashed").lines == ()


def test_kept_records_are_the_newest_of_their_cells():
    """Returning to older code does not revive its records, as every analysis reads the newest ones."""
    assert kept(make_cell(), HERE, ELSEWHERE["code"]).records == []
    assert len(kept(make_cell(), ELSEWHERE["code"], HERE).records) == 1


def test_kept_records_of_unplanned_cells_have_the_same_code():
    for environment, counts in ((HERE, 1), (ELSEWHERE["code"], 0), (ELSEWHERE["torch"], 0)):
        assert len(kept(make_cell(), environment, cell_id="of another cell").records) == counts
