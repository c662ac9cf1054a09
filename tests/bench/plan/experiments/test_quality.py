"""experiment=quality trains models in stages, then plans the cells that score them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from bench.config import ConfigError
from bench.measure.quality.section import FORWARD_SHARE, scoring_steps
from bench.plan.experiments.quality import STAGES, first_cells, make_cell_chooser, opening_text, roles_of
from bench.plan.plan import plan
from bench.record.record import Role, Status
from bench.request.legality import refusal
from bench.training.models import build_model
from bench.training.questions import questions_line, read_questions
from tests.support.cells import TWO_CORES, make_cell, make_raw

NAMES = ["local", "ring", "ulysses"]


def requests(folder, *words):
    return [make_raw("experiment=quality", f"sweep_dir={folder}", *words)]


def record_of(cell, status=Status.OK):
    return SimpleNamespace(cell_id=cell.cell_id, status=status)


def write_model(folder, trained_len=1024, vocab_size=256):
    cell = make_cell("model=qwen3_nano", f"model.vocab_size={vocab_size}")
    model = build_model(cell.model, attention_name="sdpa", max_positions=64, seed=0)
    model.config.max_position_embeddings = trained_len
    model.save_pretrained(folder)
    return folder


def run_trainings(tmp_path, choose, fails=()):
    """Let every planned training end, each with a checkpoint, until other cells follow; return these."""
    records = []
    for _ in range(len(STAGES) + 1):
        ended = {record.cell_id for record in records}
        new = [cell for cell in choose(records) if cell.cell_id not in ended]
        if not any(cell.measure.weights for cell in new):
            return records, new
        for cell in new:
            has_failed = cell.strategy in fails
            records.append(record_of(cell, Status.KILLED if has_failed else Status.OK))
            if not has_failed:
                write_model(tmp_path / "cells" / f"{cell.cell_id}-0" / f"trained_{cell.strategy}")
    raise AssertionError("no cell scores a model")


def test_trainings_come_in_stages_and_then_the_scores(tmp_path):
    choose = make_cell_chooser(requests(tmp_path), TWO_CORES)
    first = choose([])
    assert sorted(cell.strategy for cell in first) == NAMES
    assert {(cell.seq_len, cell.batch, cell.measure.steps) for cell in first} == {
        (STAGES[0].seq_len, STAGES[0].batch, STAGES[0].steps)
    }
    assert {cell.data.name for cell in first} == {"tasks"}
    assert set(roles_of(first).values()) == {Role.TRAINING}
    records, scored = run_trainings(tmp_path, choose)
    trained = [cell for cell in choose(records) if cell.measure.weights]
    lengths = {name: [cell.seq_len for cell in trained if cell.strategy == name] for name in NAMES}
    assert lengths == {name: [stage.seq_len for stage in STAGES] for name in NAMES}
    assert {cell.model.path for cell in trained} - {None} != {None}
    assert roles_of(scored) == {}
    pairs = {(cell.strategy, cell.model.name) for cell in scored}
    assert pairs == {(name, model) for name in NAMES for model in ("trained_local", f"trained_{name}")}
    by_length = {(cell.seq_len, cell.model.rope_scaling) for cell in scored if cell.strategy == "local"}
    within = {(length, "none") for length in (256, 512, 1024)}
    beyond = {(length, scaling) for length in (2048, 4096, 8192) for scaling in ("none", "yarn")}
    assert by_length == within | beyond
    assert all(cell.model.rope_scaling == "none" for cell in scored if cell.model.name == "trained_ring")
    assert {(cell.dtype, cell.engine.name) for cell in scored} == {("fp32", "fsdp2")}


def test_scores_go_on_without_a_training_that_failed(tmp_path):
    choose = make_cell_chooser(requests(tmp_path, "seq_len=256"), TWO_CORES)
    records, cells = run_trainings(tmp_path, choose, fails=["ring"])
    assert len(records) == 1 + 2 * len(STAGES)
    models = {(cell.strategy, cell.model.name) for cell in cells}
    assert ("ulysses", "trained_ulysses") in models
    assert ("ring", "trained_local") in models
    assert "trained_ring" not in {model for _, model in models}


def test_checkpoint_is_scored_at_once_as_it_is(tmp_path):
    folder = write_model(tmp_path / "mine", trained_len=4096)
    words = ("model=checkpoint", f"model.path={folder}", "seq_len=8k")
    raws = requests(tmp_path, *words)
    assert make_cell_chooser(raws, TWO_CORES) is None  # no record adds a cell
    cells = first_cells(raws, TWO_CORES)
    assert sorted(cell.strategy for cell in cells) == NAMES
    assert {(cell.model.path, cell.model.rope_scaling) for cell in cells} == {(str(folder), "none")}
    assert {cell.model.trained_len for cell in cells} == {4096}  # and not that of the small model
    assert roles_of(cells) == {}
    assert "scores the checkpoint" in opening_text(raws, TWO_CORES)
    raws = requests(tmp_path, *words, "strategy=ring", "model.rope_scaling=linear")
    (scaled,) = first_cells(raws, TWO_CORES)
    assert (scaled.strategy, scaled.model.rope_scaling) == ("ring", "linear")


def test_cells_that_records_add_have_their_role(tmp_path):
    planned = plan(requests(tmp_path, "strategy=local", "seq_len=256"), TWO_CORES, single=False)
    for _ in STAGES:
        cell = planned.cells[-1].cell
        write_model(tmp_path / "cells" / f"{cell.cell_id}-0" / "trained_local")
        planned = planned.with_added_cells([record_of(entry.cell) for entry in planned.cells])
    assert [entry.role for entry in planned.cells] == [Role.TRAINING] * len(STAGES) + [Role.CELL]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trainer=trl",), "trainer=trl: experiment=quality scores answers in the native loop"),
        (("data=tasks",), "data=tasks: experiment=quality trains on data=tasks by itself; leave data out"),
        (("measure.repeats=3",), "measure.repeats=3: experiment=quality runs every cell once; leave"),
        (
            ("measure.weights=true",),
            "measure.weights=true: experiment=quality writes the weights",
        ),
        (("length_step=1k",), "length_step=1k: belongs to experiment=max_length"),
        (("data.tokenizer=.",), "data: questions of a file or a tokenizer need a model that reads them"),
        (("cluster=slurm", "cluster.nodes=2"), "cluster=slurm: a model is trained on one node only"),
        (("workload=attention",), "workload=attention: experiment=quality takes only workload=train"),
        (("mode=predict",), "mode=predict: experiment=quality compares values"),
        (("quality.questions=0",), "quality.questions=0: must be a whole number from 1"),
        (("model=checkpoint", "model.path=nowhere"), "model.path=nowhere: is not a checkpoint folder"),
    ],
)
def test_bad_request_is_refused_in_one_line(tmp_path, words, message):
    with pytest.raises(ConfigError) as error:
        plan(requests(tmp_path, *words), TWO_CORES, single=False)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def write_rows(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={path}"


ROW = {"context": "The sky is blue. " * 9, "input": "Of what colour is the sky?", "answers": ["blue", "Blue"]}


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (
            [ROW, {"text": "no question"}],
            (),
            "cannot be read as questions .*:2 has the keys text.*LongBench",
        ),
        ([ROW | {"answers": []}], (), "context and input must be texts, answers a text or a list"),
        ([ROW | {"answers": [""]}], (), "its first answer is empty"),
        (
            [{"context": "x", "question": "x", "answers": ["x"]}],
            (),
            "LongBench's keys: context, input, answers",
        ),
        ([ROW | {"input": "\ud83d"}], (), "half of a surrogate pair"),
        ([], (), "holds no rows"),
        ([ROW], ("seq_len=40",), r"seq_len=40: a question \(rows\) has 51 tokens without its context"),
    ],
)
def test_file_without_questions_is_refused_in_one_line(tmp_path, rows, words, message):
    model = ("model=checkpoint", f"model.path={write_model(tmp_path / 'mine')}")
    with pytest.raises(ConfigError, match=message):
        plan(requests(tmp_path, *model, write_rows(tmp_path, *rows), *words), TWO_CORES, single=False)


def test_model_that_reads_no_bytes_needs_its_tokenizer(tmp_path):
    folder = write_model(tmp_path / "mine", vocab_size=1000)
    with pytest.raises(ConfigError, match="questions would be bytes, and the model has 1000 tokens"):
        plan(requests(tmp_path, "model=checkpoint", f"model.path={folder}"), TWO_CORES, single=False)


def test_questions_of_a_file_are_read_in_order(tmp_path):
    rows = [ROW | {"answers": f"blue {number}", "dataset": "colours"} for number in range(3)]
    questions, _ = read_questions(write_rows(tmp_path, *rows).removeprefix("data.path="), 2)
    assert [question.asked[0][1] for question in questions] == [" blue 0", " blue 1"]
    assert {(question.task, question.depth) for question in questions} == {("colours", None)}
    assert questions[0].asked[0][0] == "\n\nQuestion: Of what colour is the sky?\nAnswer:"


@pytest.mark.parametrize(
    "files",
    [
        {"a-00000-of-00002.jsonl": [ROW] * 2, "a-00001-of-00002.jsonl": [ROW], "b/c.jsonl": [ROW]},
        {"rows.jsonl": [ROW | {"task": "a"}] * 3 + [ROW | {"dataset": "b", "task": "c"}]},
        {"rows.jsonl": [ROW | {"dataset": "a"}] * 2 + [ROW | {"task": "b/c"}, {"dataset": "a"}]},
    ],
    ids=["folder", "one file", "bad row that is not asked"],
)
def test_limit_on_questions_is_per_task_and_says_what_it_cuts(tmp_path, files):
    for name, rows in files.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = str(tmp_path / "data")
    asked, totals = read_questions(name, 2)
    assert ([question.task for question in asked], totals) == (["a", "a", "b/c"], {"a": 3, "b/c": 1})
    line = "3 of 4 questions are asked, at most 2 (quality.questions) of each task (2): a, b/c"
    assert questions_line(name, 2) == f"data.path={name}: {line}"


def test_plan_states_the_questions_and_counts_their_time(tmp_path):
    model = ("model=checkpoint", f"model.path={write_model(tmp_path / 'mine')}")
    rows = [ROW | {"dataset": name} for name in "aabb"]
    words = (write_rows(tmp_path, *rows), "quality.questions=1", "strategy=local", "seq_len=512")
    planned = plan(requests(tmp_path, *model, *words), TWO_CORES, single=False)
    assert f"{words[0]}: 2 of 4 questions are asked, at most 1" in planned.notes[0]
    assert scoring_steps(planned.cells[0].cell) == pytest.approx(2 * FORWARD_SHARE)


def test_table_keeps_the_task_of_its_rows(tmp_path):
    rows = [ROW | {"dataset": "colours", "task": None, "language": "en"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (question,), _ = read_questions(str(tmp_path), 5)
    assert (question.task, question.asked[0][1]) == ("colours", " blue")


def test_missing_package_for_chunks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.request.resolve.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"quality\.chunks=4: needs the package bm25s; install it with"):
        plan(requests(tmp_path, "quality.chunks=4"), TWO_CORES, single=False)


def test_seeds_are_trained_and_scored_apart(tmp_path):
    raws = [
        raw
        for seed in (0, 1)
        for name in ("local", "ring")
        for raw in requests(tmp_path, "seq_len=256", f"seed={seed}", f"strategy={name}")
    ]
    records, scored = run_trainings(tmp_path, make_cell_chooser(raws, TWO_CORES))
    assert len(records) == 4 * len(STAGES)
    assert len(scored) == 2 * 3  # local's model by both, and ring's by ring
    trained = {cell.cell_id: cell.seed for cell in make_cell_chooser(raws, TWO_CORES)(records)}
    seeds = {(cell.seed, trained[Path(cell.model.path).parent.name.partition("-")[0]]) for cell in scored}
    assert seeds == {(0, 0), (1, 1)}


def test_weights_need_an_engine_with_whole_weights():
    cell = replace(make_cell("engine=fsdp2", "measure.weights=true"))
    assert refusal(cell).endswith("take engine=ddp")
