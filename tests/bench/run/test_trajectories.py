"""Trajectories compare loss and gradient norm of every step with those of another cell of the same work."""

import dataclasses
import math

import pytest
from msgspec.structs import replace

from bench.measure.losses.section import kind_of
from bench.measure.quality.section import QualitySection, Scores
from bench.measure.timing.rank import CHECKED_STEPS
from bench.plan.work import MAX_COMPARED_STEPS, work_of
from bench.record.gradient_agreement import FLOORS, gradient_limit
from bench.run.references import Trajectories
from tests.support.cells import make_cell, run_cell

WORDS = ("seq_len=512", "engine=ddp", "measure.steps=4", "measure.warmup_steps=1", "measure.budget_s=100",
         "measure.trace=false", "cluster.world_size=2")  # fmt: skip

GRADIENTS, MOMENTS = "every gradient at full length", "gradients of the first steps"


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
    signal, gradients, moments, positions = (check for check in record.checks if check.compares_training)
    against = f"cell {local[0].cell_id}"
    assert (signal.against, signal.steps, signal.of_steps) == (against, 6, 6)
    assert (moments.against, moments.steps) == (against, 4)
    for check in (gradients, positions):
        assert (check.against, check.steps, check.tokens) == (against, 1, 512)
    assert 0 <= losses.position_match.difference < losses.position_match.limit / 2


def with_position_losses(record, change):
    """Return the record with changed mean losses: those of 16 parts, then that of the boundary positions."""
    by_position = record.losses.by_position
    *parts, boundary = change([*by_position.loss, by_position.boundary_loss])
    changed = replace(by_position, loss=parts, boundary_loss=boundary)
    return replace(record, losses=replace(record.losses, by_position=changed))


@pytest.mark.parametrize(
    ("index", "change", "where"),
    [
        (0, lambda loss: 1.02 * loss, "of positions 0 to 31"),
        (15, lambda loss: 0.98 * loss, "of positions 480 to 511"),
        (16, lambda loss: 1.01 * loss, "at the ends of shards"),
        (3, lambda _: None, "of positions 96 to 127 is missing"),
    ],
)
def test_compare_finds_the_loss_of_one_part(local, index, change, where):
    def changed(losses):
        return [change(loss) if place == index else loss for place, loss in enumerate(losses)]

    trajectories = Trajectories()
    trajectories.compare(*local)
    ulysses = cell_of("ulysses")
    record = trajectories.compare(ulysses, with_position_losses(local[1], changed))
    assert record.status == "wrong_result"
    assert f"step 0: the mean loss {where}" in record.reason
    assert trajectories.compare(ulysses, local[1]).status == "ok"


def with_scores(record, *log_likelihoods, digest="0"):
    """Return the record with the scores of two tasks with two depths, one question each."""
    whole = Scores(tokens=[9] * 4, log_likelihood=[*log_likelihoods], wrong_tokens=[0] * 4, question_ms=[1.0])
    quality = QualitySection(
        task=["needle", "needle", "key_value", "key_value"], depth=[0.1, 0.9, 0.1, 0.9],
        answer_tokens=[2] * 4, sequence_tokens=512, digest=digest, whole=whole, chunks=None,
    )  # fmt: skip
    return replace(record, quality=quality)


@pytest.mark.parametrize(
    ("scores", "digest", "reason"),
    [
        ((-1.0, -2.0, -3.0, -4.0), "0", None),
        ((-1.0, -2.0, -3.0, -9.0), "1", None),
        ((-1.0, -2.0, -3.0, -9.0), "0", "answers to key_value at depth 90 % is -4.5000, not within"),
        ((-1.0, -2.0, -9.0, -90.0), "0", "answers to key_value at depth 10 % is -4.5000, not within"),
        ((-1.0, None, -3.0, -4.0), "0", "answers to needle at depth 90 % is nan, not within"),
    ],
)
def test_compare_finds_the_first_scores_that_differ(local, scores, digest, reason):
    trajectories, (cell, record) = Trajectories(), local
    trajectories.compare(cell, with_scores(record, -1.0, -2.0, -3.0, -4.0))
    compared = trajectories.compare(cell_of("ulysses"), with_scores(record, *scores, digest=digest))
    assert (compared.status == "wrong_result") == (reason is not None)
    assert reason is None or reason in compared.reason
    assert (compared.quality.match is None) == (digest != "0")


@pytest.mark.parametrize(("noise", "is_hidden"), [(1e-4, False), (2e-3, True)])
def test_noise_may_hide_a_wrong_label_at_a_boundary(local, noise, is_hidden):
    cell, record = local
    noisy = replace(record, objective=replace(record.objective, noise={"loss": noise, "grad_norm": 0.01}))
    trajectories = Trajectories()
    trajectories.compare(cell, record)
    compared = trajectories.compare(cell_of("ulysses"), noisy)
    check = next(check for check in compared.checks if check.what == "loss by position")
    assert (check.below_noise is not None) == is_hidden


def with_gradients(record, change):
    """Return the record with the changed sums of each parameter's gradient."""
    gradients = {name: change(name, sums) for name, sums in record.losses.gradients.items()}
    return replace(record, losses=replace(record.losses, gradients=gradients))


@pytest.mark.parametrize(
    ("name", "noise", "limit"),
    [("down_proj", 0.001, 0.02), ("down_proj", 0.03, 0.24), ("down_proj", None, 0.3), ("q_norm", 0.02, 0.16)],
)
def test_compare_finds_the_gradient_of_one_parameter(local, name, noise, limit):
    cell, record = local
    (parameter,) = (parameter for parameter in record.losses.gradients if name in parameter)
    noises = {} if noise is None else {kind_of(parameter): noise}
    noisy = replace(record, objective=replace(record.objective, gradient_noise=noises))
    trajectories = Trajectories()
    trajectories.compare(cell, record)

    def compared(factor):
        changed = with_gradients(
            noisy, lambda key, sums: [x * factor if key == parameter else x for x in sums]
        )
        return trajectories.compare(cell_of("ring"), changed)

    assert compared(1 - 0.95 * limit).status == "ok"
    assert compared(1 - 0.95 * limit).losses.gradient_match.limit == pytest.approx(limit)
    for factor in (1 - 1.05 * limit, 1 + 1.05 * limit, -1.0):
        assert compared(factor).reason.startswith(f"step 0: the gradient of {parameter} is off by")


def test_noise_that_hides_the_tokens_of_a_rank_is_said(local):
    cell, record = local
    trajectories = Trajectories()
    trajectories.compare(cell, record)
    gradients = record.losses.gradients
    norms = [name for name in gradients if "norm" in name]
    noise = {kind_of(name): 0.05 if name in norms else 0.02 for name in gradients}
    objective = replace(record.objective, gradient_noise=noise)
    compared = trajectories.compare(cell_of("ring"), replace(record, objective=objective))
    checks = [check for check in compared.checks if check.what in (GRADIENTS, MOMENTS)]
    text = f"change {len(norms)} of {len(gradients)} gradients as much"
    assert [check.below_noise.endswith(text) for check in checks] == [True, True]


def test_compare_finds_a_gradient_that_is_missing_or_no_number(local):
    cell, record = local
    trajectories = Trajectories()
    trajectories.compare(cell, record)
    name = next(iter(record.losses.gradients))
    without = {other: sums for other, sums in record.losses.gradients.items() if other != name}
    lost = with_gradients(record, lambda other, sums: [None, *sums[1:]] if other == name else sums)
    for changed in (replace(record, losses=replace(record.losses, gradients=without)), lost):
        reason = trajectories.compare(cell_of("ring"), changed).reason
        assert reason.startswith(f"step 0: the gradient of {name} is missing or not finite (limit")


def with_moment(record, steps, factor=1.0):
    """Return the record with its first moment times a factor, as that of another number of steps."""
    sums = {name: [x * factor for x in row] for name, row in record.losses.moment.sums.items()}
    return replace(
        record, losses=replace(record.losses, moment=replace(record.losses.moment, steps=steps, sums=sums))
    )


@pytest.mark.parametrize("steps", [2, 4])
def test_limit_of_moments_grows_with_the_root_of_steps(local, steps):
    cell, record = local
    assert record.losses.moment.steps == CHECKED_STEPS
    trajectories = Trajectories()
    trajectories.compare(cell, with_moment(record, steps))
    assert 8 * min(record.objective.gradient_noise.values()) < FLOORS["bf16"]
    limit = FLOORS["bf16"] * math.sqrt(steps)
    sound = trajectories.compare(cell_of("ring"), with_moment(record, steps, 1 + 0.95 * limit))
    (check,) = (check for check in sound.checks if check.what == MOMENTS)
    assert (sound.status, check.steps, check.reason) == ("ok", steps, None)
    wrong = trajectories.compare(cell_of("ring"), with_moment(record, steps, 1 + 1.05 * limit))
    assert wrong.reason.startswith(f"after {steps} steps: the mean gradient (AdamW's first moment) of model.")


def test_moments_of_other_numbers_of_steps_are_not_compared(local):
    cell, record = local
    trajectories = Trajectories()
    trajectories.compare(cell, record)
    compared = trajectories.compare(cell_of("ring"), with_moment(record, 3, factor=9.0))
    (check,) = (check for check in compared.checks if check.what == MOMENTS)
    assert (compared.status, check.steps, check.is_missing) == ("ok", 0, True)
    assert check.reason == "the other cell ran fewer or more than 3 steps"
    (of_first,) = (check for check in record.checks if check.what == MOMENTS)
    assert not of_first.is_missing  # later cells are compared with it


@pytest.mark.parametrize(("words", "factor"), [((), 1), (("optimizer.learning_rate=5e-3",), 5)])
def test_limit_of_gradients_grows_with_a_large_learning_rate(words, factor):
    cell = cell_of("ring", *words)
    assert gradient_limit("x.layers.0.y", cell, {"y": 0.01}) == pytest.approx(0.08 * factor)
    sgd = cell_of("ring", *words, "optimizer=sgd")
    assert gradient_limit("x.layers.0.y", sgd, {"y": 0.01}) == 0.08


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
