"""Deviation of two trainings, its limit, and the first step that exceeds the limit."""

from types import SimpleNamespace

import pytest

from bench.record.trajectory_noise import (
    LIMIT_WITHOUT_NOISE,
    LIMITS,
    MOVEMENT_WEIGHT,
    NOISE_FACTOR,
    Deviation,
    deviation_between,
    first_departure,
    limit_for,
    mean_of,
    movement_weight,
)


def trajectory(loss, grad_norm=(1.0, 1.0, 1.0)):
    return SimpleNamespace(loss=loss, grad_norm=[*grad_norm])


STEADY = trajectory([4.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (trajectory([4.0, 4.0, 4.0]), None),
        (trajectory([4.0, 4.0]), None),
        (trajectory([4.0, 4.01, 3.9]), "step 1: the loss is 4.01, not within 2.8e-04 of the 4"),
        (trajectory([4.0, float("nan"), 4.0]), "step 1: the loss is nan"),
        (trajectory([4.0, 4.0, 4.0], (1.0, 1.0, 1.1)), "step 2: the gradient norm is 1.1"),
    ],
)
def test_first_departure_names_step_and_signal(training, message):
    departure = first_departure(training, STEADY, LIMITS["bf16"])
    assert (departure is None) if message is None else departure.startswith(message)


def test_limit_follows_noise_but_not_below_the_dtypes_limit():
    noisy = limit_for("bf16", {"loss": 1e-3, "grad_norm": 1e-4})
    assert (noisy.loss, noisy.grad_norm) == (NOISE_FACTOR * 1e-3, LIMITS["bf16"].grad_norm)
    assert limit_for("bf16", {}) == LIMIT_WITHOUT_NOISE
    assert limit_for("fp32", {}) == LIMITS["fp32"]


def test_losses_that_vary_by_batch_do_not_hide_a_lost_update():
    """Losses of a trained checkpoint in bf16, without and with a lost update."""
    norms = (1.0,) * 4
    reference, lost = (
        trajectory([1.085, 1.821, 1.697, 1.655], norms),
        trajectory([1.085, 1.821, 1.697, 1.683], norms),
    )
    limit = Deviation(6.3e-3, 5.3e-2)
    moved = movement_weight("bf16", limit)
    assert first_departure(lost, reference, limit, moved).startswith("step 3: the loss is 1.683")
    assert first_departure(trajectory([1.085, 1.821, 1.697, 1.657], norms), reference, limit, moved) is None
    assert movement_weight("bf16", LIMITS["bf16"]) == MOVEMENT_WEIGHT


def test_distance_is_the_mean_over_steps_in_units():
    training = trajectory([4.0, 4.1, 4.0], (1.0, 1.0, 1.1))
    deviation = deviation_between(training, STEADY)
    assert deviation.loss == pytest.approx(0.1 / (2**0.5 * 4.0) / 3)
    assert deviation.grad_norm == pytest.approx(0.1 / 3**0.5 / 3)


def test_mean_of_covers_common_steps():
    mean = mean_of([STEADY, trajectory([5.0, 6.0], (1.0, 3.0))])
    assert (mean.loss, mean.grad_norm) == ([4.5, 5.0], [1.0, 2.0])


def test_distance_of_nan_is_infinite():
    assert deviation_between(trajectory([4.0, float("nan"), 4.0]), STEADY).loss == float("inf")


def test_distance_unit_grows_with_a_moving_loss():
    """The unit grows with the nats by which the loss has moved so far."""
    falls = trajectory([4.0, 2.0, 3.0])
    early = deviation_between(trajectory([4.0, 2.1, 3.0]), falls)
    assert early.loss == pytest.approx(0.1 / (2**0.5 * 2.0 + MOVEMENT_WEIGHT * 2.0) / 3)
    later = deviation_between(trajectory([4.0, 2.0, 3.1]), falls)
    assert later.loss == pytest.approx(0.1 / (3**0.5 * 3.0 + MOVEMENT_WEIGHT * 2.0) / 3)
