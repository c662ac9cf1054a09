"""`experiment=loss_equivalence`: cells of equal work, and known mistakes that stand out from their noise."""

import json

import pytest
from rich.console import Console

from analysis.cells.equivalence import loss_comparisons
from analysis.read.archive import read_archive
from analysis.report import write_report
from bench.config import ConfigError
from bench.measure.mistakes import MISTAKES
from bench.measure.mistakes.code import MISTAKE_CODE
from bench.plan.experiments import experiment_of
from bench.plan.experiments.loss_equivalence import comparison_cells, roles_of
from bench.plan.plan import plan
from bench.plan.work import work_of
from bench.record.record import Role
from bench.request.legality import refusal
from bench.run.progress import Progress
from bench.run.sweep import run_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw

WORDS = ("experiment=loss_equivalence", "dtype=fp32", "optimizer=sgd")


def planned(*words):
    """Return the cells by role."""
    cells = comparison_cells([make_raw(*words)], TWO_CORES)
    roles = roles_of(cells)
    return {role: [cell for cell in cells if roles[cell.cell_id] == role] for role in Role}


def test_comparison_cells_do_the_same_work():
    """The published set-up: DP=4 SP=1 GAS=1 against DP=1 SP=4 GAS=4."""
    cells = planned(*WORDS)
    (reference,) = cells[Role.REFERENCE]
    assert (reference.dp_shard, reference.sp_degree, reference.grad_accum) == (4, 1, 1)
    every = [cell for group in cells.values() for cell in group]
    assert {work_of(cell) for cell in every} == {work_of(reference)}
    assert {cell.strategy for cell in cells[Role.CELL]} >= {"ulysses", "ring", "deepspeed_ulysses"}
    for cell in cells[Role.CELL]:
        assert (cell.dp_shard, cell.sp_degree, cell.grad_accum, refusal(cell)) == (1, 4, 4, None)
    controls = cells[Role.CONTROL]
    assert {(cell.dp_shard, cell.grad_accum, cell.kernel, cell.data.rank_order) for cell in controls} == {
        (4, 1, "torch_flash", "reversed"),
        (4, 1, "math", "in_order"),
        (4, 1, "flash_blocks", "in_order"),
        (2, 2, "torch_flash", "in_order"),
        (2, 2, "math", "in_order"),
        (1, 4, "torch_flash", "in_order"),
        (1, 4, "flash_blocks", "in_order"),
    }
    assert [cell.inject_fault for cell in cells[Role.INJECTED_FAULT]] == [*MISTAKES]
    assert all(refusal(cell) is None for cell in cells[Role.INJECTED_FAULT])


def test_open_choices_cover_all_listed_dtypes_and_optimizers():
    subjects = planned("experiment=loss_equivalence", "strategy=ulysses")[Role.CELL]
    choices = {(cell.dtype, cell.optimizer.name, cell.seed) for cell in subjects}
    in_bf16 = {("bf16", "adamw", seed) for seed in (0, 1, 2)}
    assert choices == {("fp32", "adamw", 0), ("fp32", "sgd", 0), *in_bf16}
    of_one = planned("experiment=loss_equivalence", "strategy=ulysses", "dtype=bf16", "seed=3")
    assert {cell.seed for group in of_one.values() for cell in group} == {3}


def test_smaller_sp_degree_uses_more_data_parallel_groups():
    (cell,) = planned(*WORDS, "strategy=ring", "layout=striped", "sp_degree=2", "grad_accum=2")[Role.CELL]
    assert (cell.layout, cell.dp_shard, cell.sp_degree, cell.grad_accum) == ("striped", 2, 2, 4)


def test_reference_of_replicas_is_sharded_over_all_ranks():
    (reference,) = planned(*WORDS, "strategy=ring", "sp_degree=2", "dp_replicate=2")[Role.REFERENCE]
    assert (reference.dp_replicate, reference.dp_shard, reference.sp_degree) == (1, 4, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cluster.world_size=1", "no ranks share a sequence; take two or more"),
        ("strategy=local", "strategy=local: .*; name a strategy that shares sequences"),
    ],
)
def test_request_without_comparison_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        planned(*WORDS, words)


@pytest.mark.parametrize("name", ["loss_equivalence", "quality"])
def test_experiment_refuses_another_workload(name):
    with pytest.raises(ConfigError, match=f"workload=attention: experiment={name} takes only workload=train"):
        experiment_of([make_raw(f"experiment={name}", "workload=attention")])


def test_packed_documents_leave_out_impossible_mistakes():
    mistakes = planned(*WORDS, "strategy=ring", "data.packing=documents")[Role.INJECTED_FAULT]
    assert {*MISTAKES} - {cell.inject_fault for cell in mistakes} == {"own_block_in_ring_backward"}


def test_every_known_mistake_has_code():
    assert {*MISTAKE_CODE} == {"none", *MISTAKES}


@pytest.mark.parametrize("facts", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_without_effect_are_not_planned(facts):
    assert not facts.applies_to(make_cell("strategy=local", "data.prompt_tokens=1"))


@pytest.mark.ranks
def test_loss_equivalence_passes_ring_and_finds_every_mistake(launcher, tmp_path):
    raws = [make_raw(
        *WORDS, "strategy=ring", "engine=ddp", "seq_len=256", "cluster.world_size=2", "measure.steps=5",
        "optimizer.learning_rate=0.1", f"sweep_dir={tmp_path}",
    )]  # fmt: skip
    whole = plan(raws, TWO_CORES, single=False)
    code = run_plan(whole, launcher, Progress(Console(quiet=True)), write_report=write_report)
    (comparison,) = loss_comparisons(read_archive([tmp_path], {}))
    outcomes = {row.training.label: (row.is_within, row.training.record.status) for row in comparison.rows}
    assert outcomes.pop("ring zigzag") == (True, "ok")
    mistakes = {f"mistake: {name}": (False, "wrong_result") for name in MISTAKES}
    assert {label: outcomes.pop(label) for label in mistakes} == mistakes
    assert all(within and status == "ok" for within, status in outcomes.values())
    assert all(other.loss for other in comparison.other_trainings)
    assert code == 0
    assert "ring zigzag matched data parallelism" in (tmp_path / "report.html").read_text()
    config = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])["config"]
    used = config["optimizer"], config["optimizer.learning_rate"], config["inject_fault"]
    assert used == ("sgd", 0.1, "none")
    assert experiment_of(raws).roles is roles_of
