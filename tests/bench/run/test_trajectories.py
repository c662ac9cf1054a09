"""Trajectories compare loss and gradient norm of every step with those of another cell of the same work."""

import dataclasses

import pytest
from msgspec.structs import replace

from bench.plan.work import MAX_COMPARED_STEPS, work_of
from bench.run.references import Trajectories
from tests.support.cells import make_cell, run_cell

WORDS = ("seq_len=512", "engine=ddp", "measure.steps=4", "measure.warmup_steps=1", "measure.budget_s=100",
         "measure.trace=false", "cluster.world_size=2")  # fmt: skip


def cell_of(strategy, *more):
    return make_cell(*WORDS, f"strategy={strategy}", *more)


@pytest.fixture(scope="module")
def local(launcher, tmp_path_factory):
    cell = cell_of("local")
    return cell, run_cell(launcher, cell, tmp_path_factory.mktemp("local"))[0]


def test_compare_records_the_reference_and_the_compared_steps(launcher, tmp_path, local):
    cell, trajectories = cell_of("deepspeed_ulysses"), Trajectories()
    trajectories.compare(*local)
    record = trajectories.compare(cell, run_cell(launcher, cell, tmp_path)[0])
    losses = record.losses
    assert record.status == "ok", record.reason
    assert (losses.compared_with, losses.compared_steps) == (local[0].cell_id, len(losses.loss))
    assert len(losses.loss) == 1 + 4 + 1  # warm-up, timed, inspected
    (check,) = (check for check in record.checks if check.compares_training)
    assert (check.against, check.steps, check.of_steps) == (f"cell {local[0].cell_id}", 6, 6)


def test_compare_finds_a_departure_despite_noisy_weights(local):
    """The loss differs by 0.8 nats between batches; 0.05 nats are beyond what rounding may do."""
    cell, record = local
    objective = replace(record.objective, noise={"loss": 1.6e-3, "grad_norm": 1e-3})

    def with_losses(loss):
        losses = replace(record.losses, loss=loss)
        return replace(record, losses=losses, objective=objective)

    trajectories = Trajectories()
    trajectories.compare(cell, with_losses([1.0, *[1.8] * 5]))
    assert trajectories.compare(cell_of("ring"), with_losses([1.0, *[1.8] * 4, 1.82])).status == "ok"
    departed = trajectories.compare(cell_of("ring"), with_losses([1.0, *[1.8] * 4, 1.85]))
    assert departed.reason.startswith("step 5: the loss is 1.85")


def test_compare_stops_after_max_compared_steps(local):
    cell, record = local

    def with_losses(loss):
        losses = replace(record.losses, loss=loss, grad_norm=[1.0] * len(loss))
        return replace(record, losses=losses)

    for step, status in ((MAX_COMPARED_STEPS - 1, "wrong_result"), (MAX_COMPARED_STEPS, "ok")):
        trajectories = Trajectories()
        trajectories.compare(cell, with_losses([1.0] * 30))
        compared = trajectories.compare(cell_of("ring"), with_losses([1.0] * step + [2.0] * (30 - step)))
        assert (compared.status, compared.losses.compared_steps) == (status, MAX_COMPARED_STEPS)


def test_local_replaces_another_reference_and_no_other_does(local):
    cell, record = local
    trajectories = Trajectories()
    for strategy in ("ulysses", "local", "ring"):
        compared = trajectories.compare(dataclasses.replace(cell, strategy=strategy), record)
    assert compared.losses.compared_with == cell.cell_id


def test_local_is_not_compared_with_earlier_strategies(local):
    cell, record = local
    wrong = replace(record.losses, loss=[2 * loss for loss in record.losses.loss])
    trajectories = Trajectories()
    trajectories.compare(cell_of("ulysses"), replace(record, losses=wrong))
    assert trajectories.compare(cell, record).status == "ok"
    assert trajectories.compare(cell_of("ring"), record).status == "ok"


def test_add_finished_makes_finished_cells_references(local):
    cell, record = local
    trajectories = Trajectories()
    trajectories.add_finished([cell], [record])
    assert trajectories.compare(cell_of("ulysses"), record).losses.compared_with == cell.cell_id


def test_work_of_depends_on_tokens_and_parameters_only():
    work = work_of(cell_of("ulysses"))
    assert work_of(cell_of("ring", "cluster.world_size=4", "checkpointing=true")) == work
    for other in ("seq_len=1k", "seed=1", "batch=2", "dtype=fp32", "engine=zero3", "model=qwen3_0_6b"):
        assert work_of(cell_of("ulysses", other)) != work
