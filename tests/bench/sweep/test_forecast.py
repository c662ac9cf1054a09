"""What a plan is expected to take, and what `--plan` says of it without running anything."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import run_sweep
from bench.cell.launcher import Launcher
from bench.config import AUTO, ConfigError
from bench.environment import REPOSITORY, Machine, describe
from bench.passes import planned_stages
from bench.request.choices import default_strategies, read_option
from bench.request.measure import WINDOWS
from bench.sweep.auto_choices import CHOICES
from bench.sweep.estimate import START_S, Estimate
from bench.sweep.expected import Expected, ExpectedSteps, earlier_records, modelled
from bench.sweep.forecast import INTERVAL_STEPS, Forecast
from bench.sweep.plan import plan
from bench.sweep.plan_lines import UNLIMITED, short_lines, whole_plan
from bench.sweep.run import pending_cells
from tests.cells import FOUR_H100, TWO_CORES, make_raw, raw_with, tiny_cell
from tests.command import NO_GPU, typed_here

REFERENCE = REPOSITORY / "results" / "reference" / "cpu"
ITS_MACHINE = Machine(gpus=(), cores=2, cpu="AMD EPYC", memory_bytes=2**34)
GPUS = replace(FOUR_H100, gpu_memory_bytes=(80 * 2**30,) * 4)


def raws(lengths, strategies, **values):
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return [
        raw_with(
            {"strategy": read_option("strategy", name), "seq_len": length, "sweep_dir": "out", **changed}
        )
        for name in strategies or default_strategies()
        for length in lengths
    ]


def forecast(machine=TWO_CORES, lengths=("8k", "64k", "96k"), strategies=(), step_s=modelled, **values):
    planned = plan(raws(lengths, strategies, **values), machine, single=False)
    return Forecast(planned, planned.cells, machine, Estimate(step_s))


def one_second(_):
    return Expected(1.0, "a clock")


def lines_of(found, width=UNLIMITED):
    return "\n".join(whole_plan(found, raws(["8k"], ["ring"]), width=width))


def records():
    return [json.loads(line) for line in (REFERENCE / "records.jsonl").read_text().splitlines()]


def test_the_readmes_sweep_is_expected_to_take_what_it_took():
    found = forecast(ITS_MACHINE)
    assert found.total_s == pytest.approx(sum(each["wall_s"] for each in records()), rel=0.15)
    assert found.unknown == 0
    assert "another CPU" in found.bases[0]


def test_the_advised_budget_gives_every_cell_an_interval_in_the_time_that_is_said():
    found = forecast(measure__repeats=1)
    assert {each.timed_steps for each in found.cells} == {1, 20}
    richer = forecast(measure__repeats=1, measure__budget_s=found.advice.budget_s)
    assert min(each.timed_steps for each in richer.cells) >= INTERVAL_STEPS
    assert richer.advice is None
    assert richer.total_s == pytest.approx(found.advice.total_s)
    said = next(line for line in short_lines(found) if "measure.budget_s=" in line)
    assert said.startswith("6 cells will have fewer than 6 timed steps")


def test_no_budget_is_advised_where_fewer_steps_were_asked_for():
    assert forecast(measure__steps=INTERVAL_STEPS - 1).advice is None


def test_a_cell_that_will_not_be_done_in_time_is_named_and_advice_makes_room_for_it():
    found = forecast(lengths=["8k"], strategies=["local"], step_s=one_second, measure__timeout_s=20)
    assert "1 cell will not be done within measure.timeout_s=20" in lines_of(found)
    late = forecast(lengths=["8k"], strategies=["local"], step_s=one_second, measure__budget_s=3,
                    measure__timeout_s=8)  # fmt: skip
    assert late.advice.timeout_s > 8
    assert f"measure.timeout_s={late.advice.timeout_s}" in lines_of(late)


def test_a_cell_that_does_not_fit_is_not_counted_and_advised_no_budget():
    found = forecast(GPUS)
    early = {(each.cell.strategy, each.cell.seq_len) for each in found.cells if each.ends_early}
    assert early == {("local", 65536), ("local", 98304)}
    rest = [each for each in found.cells if not each.ends_early]
    assert found.total_s == pytest.approx(START_S + sum(each.cell_s for each in rest))
    assert found.bases == ["the cost model on hardware=h100_80gb"]
    assert f"and what {found.unknown} more of the cells take" in lines_of(found)


@pytest.mark.parametrize("count", [4, 8])
def test_the_minutes_of_gpus_count_what_a_cell_takes_outside_its_steps(count):
    """15 to 40 s by what starts, is built and is read."""
    found = forecast(replace(GPUS, gpus=GPUS.gpus[:1] * count))
    for each in found.cells:
        steps = sum(stage.steps for stage in planned_stages(each.cell.measure, each.step.seconds))
        assert 15 <= each.cell_s - steps * each.step.seconds <= 40
    assert found.total_s >= sum(each.cell_s for each in found.cells if each.lasts)


def test_a_reference_that_cannot_fit_is_neither_counted_nor_listed():
    found = forecast(GPUS, strategies=["ulysses"], lengths=["8k", "64k"])
    assert [cell.seq_len for cell in found.references] == [8192]
    assert len(found.not_tried) == 1
    assert "64k: local does not run as a reference: a rank needs" in lines_of(found)


def test_an_illegal_cell_has_no_expected_step():
    """Of one token on four ranks there is no arithmetic."""
    found = forecast(GPUS, strategies=["ring"], lengths=["1"])
    (cell,) = found.cells
    assert (cell.step, cell.cell_s, cell.reason is None) == (None, None, False)


def test_cpu_ranks_share_the_hosts_memory():
    found = forecast(lengths=["1k"], strategies=["ulysses"], model=read_option("model", "qwen3_4b"))
    (cell,) = found.cells
    assert cell.room.usable == TWO_CORES.memory_bytes // 2
    assert cell.ends_early
    assert "memory that a rank may use: 8.0 GiB (cpu, ranks=2)" in lines_of(found)
    assert "CPU ranks share this host's memory; cluster.memory_limit_gib=..." in lines_of(found)


def test_steps_of_which_nothing_is_known_are_said_to_be_unknown():
    found = forecast(lengths=["8k"], strategies=["ring"], kernel="math")
    said = lines_of(found)
    assert found.cells[0].step is None
    assert "an unknown time" in said
    assert "python -m bench.calibrate" in said


def test_references_are_listed_and_take_no_longer_than_their_budget():
    alone = forecast(lengths=["64k"], strategies=["ring"], step_s=one_second, measure__reference_budget_s=0)
    beside = forecast(lengths=["64k"], strategies=["ring"], step_s=one_second, measure__reference_budget_s=3)
    assert (alone.references, len(beside.references)) == ((), 1)
    assert beside.total_s - alone.total_s == 3  # two steps and what every cell takes would be 4
    assert "reference local 64k" in lines_of(beside)
    with_base = forecast(lengths=["64k"], strategies=["local", "ring"], step_s=one_second)
    assert with_base.references == ()


@pytest.mark.parametrize(("budget_s", "gets"), [(10_000, 5), (60, 0)])
def test_repeats_that_are_left_open_are_expected_by_the_same_rule_that_will_choose_them(
    budget_s, gets, monkeypatch
):
    monkeypatch.setitem(WINDOWS, "cpu", replace(WINDOWS["cpu"], repeats=AUTO))
    found = forecast(lengths=["8k"], step_s=one_second, measure__repeats_budget_s=budget_s)
    assert {more.gets for more in found.repeats.values()} == {gets}
    assert ("expected after that at 8k: 5 more" in lines_of(found)) == bool(gets)


def test_predicted_cells_take_no_time_and_the_plan_says_what_measuring_them_would():
    h100 = read_option("hardware", "h100_80gb")
    found = forecast(lengths=["8k"], strategies=["ulysses"], mode="predict", hardware=h100)
    assert not any(each.runs for each in found.cells)
    assert found.measured_instead_s > 10
    assert "measuring them there takes about" in lines_of(found)
    assert short_lines(found) == []


def test_what_a_sweep_measured_here_counts_for_lengths_near_it():
    known = ExpectedSteps(ITS_MACHINE, records())
    here = {each.cell.seq_len: each.cell for each in forecast(ITS_MACHINE, strategies=["local"]).cells}
    step_s = {each["config"]["seq_len"]: each["timing"]["step_times_ms"] for each in records()[::3]}
    assert known.of(here[65536]).seconds == pytest.approx(step_s[65536][0][0] / 1e3)
    assert "measured here" in known.of(here[65536]).basis
    far = replace(here[8192], seq_len=1024)
    assert known.of(far) == modelled(far)
    other = replace(here[65536], engine="ddp")
    assert known.of(other) == modelled(other)
    elsewhere = ExpectedSteps(replace(ITS_MACHINE, cores=8), records())
    assert elsewhere.of(here[65536]) == modelled(here[65536])


def test_records_that_cannot_be_read_count_as_none(tmp_path):
    for name, text in {"a": "{", "b": "{}\n", "c": (REFERENCE / "records.jsonl").read_text()}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(text)
    assert len(earlier_records(tmp_path)) == len(records())
    assert earlier_records(tmp_path / "nothing") == []


def test_an_estimate_corrects_what_was_expected_by_what_steps_took():
    estimate = Estimate(lambda cell: Expected(cell.seq_len / 1024, "a rule"))
    near, asked = (tiny_cell("strategy=ring", f"seq_len={length}") for length in ("8k", "64k"))
    assert estimate.step(asked) == Expected(64, "a rule")
    estimate.learn(near, 24.0)
    assert estimate.step_s(asked) == 3 * 64


def test_every_choice_that_may_be_left_open_is_told():
    open_keys = {
        f"{key}.{name}" if name else key
        for key, value in make_raw().items()
        for name, each in (value.items() if isinstance(value, dict) else [("", value)])
        if each == AUTO
    }
    assert {*CHOICES} == open_keys - {"cluster.name"}  # told by its device
    found = forecast(lengths=["8k"], strategies=["ring", "usp"])
    table, _, notes = lines_of(found).partition("automatic choices in all cells: ")
    assert "ulysses_degree=" in table
    told = {word.partition("=")[0] for word in notes.splitlines()[0].split()}
    in_table_or_label = {"ulysses_degree", "sp_degree"}
    assert {key.removesuffix(".name") for key in CHOICES} - told <= in_table_or_label


@pytest.mark.parametrize("width", [80, 120, UNLIMITED])
def test_a_reason_is_in_the_table_or_where_that_is_narrow_a_note_below_it(width):
    found = forecast(lengths=["1k", "1001"], strategies=["ring", "deepspeed_ulysses"])
    reason = str(found.illegal[0].reason)
    said = lines_of(found, width)
    table = said.partition("\n\n")[2].partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= width
    assert (f"note 1: {reason}" in said) == (width < UNLIMITED)
    assert re.search(r"unsupported +note 1$" if width < UNLIMITED else re.escape(reason), table, re.MULTILINE)


@pytest.fixture
def no_launcher(monkeypatch):
    monkeypatch.setattr(Launcher, "__init__", lambda *_: pytest.fail("a plan needs no launcher"))
    monkeypatch.setattr(run_sweep, "this_machine", lambda: TWO_CORES)


@pytest.mark.usefixtures("no_launcher")
def test_the_command_lists_cells_in_order_says_what_is_illegal_and_leaves_nothing(tmp_path):
    words = ("-m", "seq_len=2k,1k,1001", "strategy=ring", "measure.repeats=2", "--plan")
    said = typed_here(tmp_path, *words)
    assert (said.returncode, said.stderr, [*tmp_path.iterdir()]) == (0, "", [])
    rows = re.findall(r"^(ring \S+ sp 2(?: repeat 2)?)  ", said.stdout, flags=re.MULTILINE)
    assert [name for name in rows if "repeat" not in name] == [
        "ring 1001 sp 2",
        "ring 1k sp 2",
        "ring 2k sp 2",
    ]
    assert sorted(rows[3:]) == ["ring 1001 sp 2 repeat 2", "ring 1k sp 2 repeat 2", "ring 2k sp 2 repeat 2"]
    assert "unsupported  seq_len=1001 must be a multiple of 4" in said.stdout
    assert "the nearest is seq_len=1000" in said.stdout


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("words", "said"),
    [(("seq_len=1001", "strategy=ring"), "must be a multiple of 4"), (("seq_len=8q",), "seq_len=8q")],
)
def test_a_request_that_cannot_run_is_refused(tmp_path, words, said):
    done = typed_here(tmp_path, "--plan", *words)
    assert (done.returncode, [*tmp_path.iterdir()]) == (2, [])
    assert said in done.stderr


def test_a_sweep_says_in_short_what_it_is_expected_to_take(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(run_sweep, "this_machine", lambda: TWO_CORES)
    monkeypatch.setattr(run_sweep, "run_plan", lambda found, *_, **__: plans.append(found) or 0)
    assert typed_here(tmp_path, "-m", "seq_len=1k,1001", "strategy=ring").returncode == 0
    said = "\n".join(plans[0].notes)
    assert re.search(
        r"^expected: about \d+ s by the cost model.*; --plan lists every cell", said, re.MULTILINE
    )
    assert "1 cell cannot run and will be unsupported: seq_len=1001" in said


def test_a_plan_imports_no_torch(tmp_path):
    environment = NO_GPU | {"PYTHONPATH": str(REPOSITORY)}
    code = "import sys, run_sweep\ntry: run_sweep.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--plan", "seq_len=1k"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_a_sweep_that_is_resumed_is_planned_without_what_is_done(tmp_path):
    def planned(**values):
        return plan(
            raws(["8k", "64k"], ["local"], sweep_dir=str(tmp_path), **values), ITS_MACHINE, single=False
        )

    done = planned().cells[0].cell
    record = next(each for each in records() if each["config"]["seq_len"] == done.seq_len)
    (tmp_path / "records.jsonl").write_text(
        json.dumps(record | {"cell_id": done.cell_id, "environment": describe({})}) + "\n"
    )
    with pytest.raises(ConfigError, match="resume=true"):
        pending_cells(planned())
    resumed = planned(resume=True)
    left = pending_cells(resumed)
    assert [each.cell.seq_len for each in left] == [65536]
    said = lines_of(Forecast(resumed, left, ITS_MACHINE, Estimate(modelled)))
    assert "plan of 2 cells, 1 of them done" in said
    assert re.search(r"^local 8k .* done$", said, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
