"""The search for the longest sequence that trains finds what trying every length finds."""

from dataclasses import replace

import pytest

from bench.config import ConfigError
from bench.cost.band import Fit
from bench.extras.predict.predicted import prediction_of
from bench.plan.experiments import experiment_of
from bench.plan.experiments.max_length import CPU_LIMIT_GIB, growing, searches, tried
from bench.plan.plan import plan
from bench.plan.stored import read_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.command import typed_here
from tests.support.records import as_record, make_record, read_lines

PREDICTED = ("mode=predict", "hardware=h100_80gb", "cluster.world_size=2", "model=qwen3_0_6b")
PREDICTED += ("checkpointing=false", "cluster.memory_limit_gib=24")
STRATEGIES = ("local", "ring")


def raw(*words):
    return make_raw("experiment=max_length", "strategy=ring", *words)


def lengths(cells):
    return [cell.seq_len for cell in cells]


def with_status(cells, status):
    return [as_record(make_record(cell_id=cell.cell_id, status=status)) for cell in cells]


def outcomes(folder):
    """By strategy the statuses of all lengths."""
    found = {}
    for record in read_lines(folder / "records.jsonl"):
        of_strategy = found.setdefault(record["config"]["strategy"], {})
        assert record["config"]["seq_len"] not in of_strategy  # each length once
        of_strategy[record["config"]["seq_len"]] = record["status"]
    return found


def longest(statuses):
    return max((length for length, status in statuses.items() if status == "ok"), default=None)


@pytest.mark.parametrize("first", [1, 2, 40, 64, 700])
def test_every_answer_is_found_with_its_neighbour_tried_and_no_number_twice(first):
    most = 100
    for answer in range(most + 1):
        numbers = [*tried(first, 1, most, lambda number, answer=answer: number <= answer)]
        assert {answer, answer + 1} & {*range(1, most + 1)} <= {*numbers}
        assert len(numbers) == len({*numbers})
        assert {*numbers} <= {*range(1, most + 1)}


def test_the_steps_away_from_the_first_number_double_both_ways():
    assert [*tried(64, 1, 1000, lambda number: True if number < 80 else None)] == [64, 66, 70, 78, 94]
    assert [*tried(64, 1, 1000, lambda number: False if number > 48 else None)] == [64, 62, 58, 50, 34]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """The search, by arithmetic: it starts no ranks."""
    folder = tmp_path_factory.mktemp("predicted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.write_report", lambda _: True)
        words = ("experiment=max_length", *PREDICTED, f"strategy={','.join(STRATEGIES)}")
        done = typed_here(folder, *words, "sweep_dir=out")
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_equals_a_scan_of_all_lengths(predicted, strategy):
    cell = make_cell(*PREDICTED, f"strategy={strategy}")
    fits = {
        length: prediction_of(replace(cell, seq_len=length)).fit is not Fit.OUT_OF_MEMORY
        for length in range(1024, 24 * 1024, 1024)
    }
    found = outcomes(predicted / "out")[strategy]
    assert longest(found) == max(length for length, does_fit in fits.items() if does_fit)
    assert found[longest(found) + 1024] == "out_of_memory"
    assert len(found) < len(fits) / 2


def test_what_is_broken_off_goes_on_by_its_records(predicted, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.report.write_report", lambda _: True)
    lines = (predicted / "out" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "records.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "out" / "config.yaml").write_text((predicted / "out" / "config.yaml").read_text())
    done = typed_here(tmp_path, "resume=true", "sweep_dir=out")
    assert done.returncode == 0, done.stderr
    assert outcomes(tmp_path / "out") == outcomes(predicted / "out")
    assert read_plan(tmp_path / "out")[1] == read_plan(predicted / "out")[1]
    orders = [record["order"] for record in read_lines(tmp_path / "out" / "records.jsonl")]
    assert orders == [*range(len(lines))]


def test_only_running_out_of_memory_says_that_a_length_is_too_long():
    grow = growing([raw()], TWO_CORES)
    first = grow([])
    for status in ("crashed", "timed_out", "wrong_result", "killed", "error", "unsupported"):
        assert lengths(grow(with_status(first, status))) == lengths(first)
    longer, shorter = grow(with_status(first, "ok")), grow(with_status(first, "out_of_memory"))
    assert lengths(longer)[1] > lengths(first)[0] > lengths(shorter)[1]


def test_lengths_are_rounded_to_what_the_layout_divides():
    (search,) = searches([raw("cluster.world_size=3")], TWO_CORES)
    found = [search.cell(steps).seq_len for steps in (1, 2, 3)]
    assert found == [1020, 2046, 3072]
    (padded,) = searches([raw("cluster.world_size=3", "pad=true")], TWO_CORES)
    assert [(cell.seq_len, cell.padding) for cell in (padded.cell(1), padded.cell(2))] == [
        (1024, 2), (2048, 4),
    ]  # fmt: skip


def test_it_begins_where_the_formula_has_room_or_where_the_request_says():
    rooms = [searches([raw(f"cluster.memory_limit_gib={gib}")], TWO_CORES)[0].first for gib in (0.05, 0.1)]
    assert rooms[0] < rooms[1] < 3 * rooms[0]
    assert lengths(growing([raw("seq_len=3k")], TWO_CORES)([])) == [3072]
    assert lengths(growing([raw("seq_len=3k", "data.prompt_tokens=5000")], TWO_CORES)([])) == [5120]


def test_a_cpu_rank_has_a_limit_that_is_said():
    said = experiment_of([raw()]).opening([raw()], TWO_CORES)
    assert f"cluster.memory_limit_gib={CPU_LIMIT_GIB}" in said
    assert "memory_limit_gib" not in experiment_of([raw()]).opening(
        [raw("cluster.memory_limit_gib=0.1")], TWO_CORES
    )
    (cell,) = growing([raw("cluster.memory_limit_gib=0.1")], TWO_CORES)([])
    assert cell.cluster.memory_limit_gib == 0.1


REFUSED = {
    "repeats": ((("measure.repeats=3",),), "measure.repeats=3: experiment=max_length runs each length once"),
    "two beginnings": ((("seq_len=8k",), ("seq_len=16k",)), "begins at one; name one, or none"),
    "a step of no length": ((("length_step=8q",),), "length_step=8q: a length is a whole number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_words_that_it_cannot_take_are_refused(case):
    words, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        plan([raw(*each) for each in words], TWO_CORES, single=False)


def test_the_step_belongs_to_no_other_experiment():
    with pytest.raises(ConfigError, match="length_step=1k: belongs to experiment=max_length; leave it out"):
        plan([make_raw("length_step=1k")], TWO_CORES, single=False)
