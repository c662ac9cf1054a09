"""The search for the longest sequence that trains finds the same length as a scan of all lengths."""

from dataclasses import replace

import pytest

from bench.config import ConfigError
from bench.cost.band import Fit
from bench.extras.predict.predicted_record import prediction_of
from bench.plan.experiments import experiment_of
from bench.plan.experiments.max_length import CPU_LIMIT_GIB, make_cell_chooser, numbers_to_try, searches
from bench.plan.plan import plan
from bench.plan.stored import read_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.command import run_command_here
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
    """Return the statuses of all lengths by strategy."""
    by_strategy = {}
    for record in read_lines(folder / "records.jsonl"):
        statuses = by_strategy.setdefault(record["config"]["strategy"], {})
        assert record["config"]["seq_len"] not in statuses  # no length runs twice
        statuses[record["config"]["seq_len"]] = record["status"]
    return by_strategy


def longest(statuses):
    return max((length for length, status in statuses.items() if status == "ok"), default=None)


@pytest.mark.parametrize("first", [1, 2, 40, 64, 700])
def test_numbers_to_try_find_every_answer_without_repetition(first):
    most = 100
    for answer in range(most + 1):
        numbers = [*numbers_to_try(first, 1, most, lambda number, answer=answer: number <= answer)]
        assert {answer, answer + 1} & {*range(1, most + 1)} <= {*numbers}
        assert len(numbers) == len({*numbers})
        assert {*numbers} <= {*range(1, most + 1)}


def test_numbers_to_try_double_the_distance_in_both_directions():
    assert [*numbers_to_try(64, 1, 1000, lambda number: True if number < 80 else None)] == [
        64,
        66,
        70,
        78,
        94,
    ]
    assert [*numbers_to_try(64, 1, 1000, lambda number: False if number > 48 else None)] == [
        64,
        62,
        58,
        50,
        34,
    ]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """Return the folder of a predicted search, which starts no ranks."""
    folder = tmp_path_factory.mktemp("predicted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.write_report", lambda _: True)
        words = ("experiment=max_length", *PREDICTED, f"strategy={','.join(STRATEGIES)}")
        done = run_command_here(folder, *words, "sweep_dir=out")
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_search_equals_a_scan_of_all_lengths(predicted, strategy):
    cell = make_cell(*PREDICTED, f"strategy={strategy}")
    fits = {
        length: prediction_of(replace(cell, seq_len=length)).fit is not Fit.OUT_OF_MEMORY
        for length in range(1024, 24 * 1024, 1024)
    }
    statuses = outcomes(predicted / "out")[strategy]
    assert longest(statuses) == max(length for length, does_fit in fits.items() if does_fit)
    assert statuses[longest(statuses) + 1024] == "out_of_memory"
    assert len(statuses) < len(fits) / 2


def test_interrupted_search_resumes_from_its_records(predicted, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.report.write_report", lambda _: True)
    lines = (predicted / "out" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "records.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "out" / "config.yaml").write_text((predicted / "out" / "config.yaml").read_text())
    done = run_command_here(tmp_path, "resume=true", "sweep_dir=out")
    assert done.returncode == 0, done.stderr
    assert outcomes(tmp_path / "out") == outcomes(predicted / "out")
    assert read_plan(tmp_path / "out")[1] == read_plan(predicted / "out")[1]
    orders = [record["order"] for record in read_lines(tmp_path / "out" / "records.jsonl")]
    assert orders == [*range(len(lines))]


def test_only_out_of_memory_leads_to_shorter_lengths():
    choose_cells = make_cell_chooser([raw()], TWO_CORES)
    first = choose_cells([])
    for status in ("crashed", "timed_out", "wrong_result", "killed", "error", "unsupported"):
        assert lengths(choose_cells(with_status(first, status))) == lengths(first)
    longer, shorter = (choose_cells(with_status(first, status)) for status in ("ok", "out_of_memory"))
    assert lengths(longer)[1] > lengths(first)[0] > lengths(shorter)[1]


def test_lengths_are_rounded_to_a_multiple_of_the_layout():
    (search,) = searches([raw("cluster.world_size=3")], TWO_CORES)
    rounded = [search.cell(steps).seq_len for steps in (1, 2, 3)]
    assert rounded == [1020, 2046, 3072]
    (padded,) = searches([raw("cluster.world_size=3", "pad=true")], TWO_CORES)
    assert [(cell.seq_len, cell.padding) for cell in (padded.cell(1), padded.cell(2))] == [
        (1024, 2), (2048, 4),
    ]  # fmt: skip


def test_search_starts_at_the_memory_formula_or_the_request():
    low, high = (
        searches([raw(f"cluster.memory_limit_gib={gib}")], TWO_CORES)[0].first_steps for gib in (0.05, 0.1)
    )
    assert low < high < 3 * low
    assert lengths(make_cell_chooser([raw("seq_len=3k")], TWO_CORES)([])) == [3072]
    assert lengths(make_cell_chooser([raw("seq_len=3k", "data.prompt_tokens=5000")], TWO_CORES)([])) == [5120]


def test_opening_text_states_the_memory_limit_of_cpu_ranks():
    message = experiment_of([raw()]).opening_line([raw()], TWO_CORES)
    assert f"cluster.memory_limit_gib={CPU_LIMIT_GIB}" in message
    assert "memory_limit_gib" not in experiment_of([raw()]).opening_line(
        [raw("cluster.memory_limit_gib=0.1")], TWO_CORES
    )
    (cell,) = make_cell_chooser([raw("cluster.memory_limit_gib=0.1")], TWO_CORES)([])
    assert cell.cluster.memory_limit_gib == 0.1


REFUSED = {
    "repeats": ((("measure.repeats=3",),), "measure.repeats=3: experiment=max_length runs each length once"),
    "two beginnings": (
        (("seq_len=8k",), ("seq_len=16k",)),
        "one value, the first length; write one value, or leave it out",
    ),
    "a step of no length": ((("length_step=8q",),), "length_step=8q: a length is a whole number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_max_length_refuses_unsuitable_keys(case):
    words, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        plan([raw(*raw_words, "sweep_dir=x") for raw_words in words], TWO_CORES, single=False)


def test_length_step_is_refused_without_max_length():
    with pytest.raises(ConfigError, match="length_step=1k: belongs to experiment=max_length; leave it out"):
        plan([make_raw("length_step=1k", "sweep_dir=x")], TWO_CORES, single=False)
