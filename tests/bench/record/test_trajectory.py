"""How far two trainings are apart, what the noise is, and the first step in which they part."""

from types import SimpleNamespace

import pytest

from bench.record.trajectory_noise import (
    LIMITS,
    MOVED,
    NOISE_FACTOR,
    UNMEASURED,
    Deviation,
    distance,
    first_departure,
    limit_for,
    mean_of,
    moved_for,
)


def made_up(loss, grad_norm=(1.0, 1.0, 1.0)):
    return SimpleNamespace(loss=loss, grad_norm=[*grad_norm])


STEADY = made_up([4.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (made_up([4.0, 4.0, 4.0]), None),
        (made_up([4.0, 4.0]), None),
        (made_up([4.0, 4.01, 3.9]), "step 1: the loss is 4.01, not within 2.8e-04 of the 4"),
        (made_up([4.0, float("nan"), 4.0]), "step 1: the loss is nan"),
        (made_up([4.0, 4.0, 4.0], (1.0, 1.0, 1.1)), "step 2: the gradient norm is 1.1"),
    ],
)
def test_the_first_departure_is_named(found, said):
    departure = first_departure(found, STEADY, LIMITS["bf16"])
    assert (departure is None) if said is None else departure.startswith(said)


def test_a_limit_follows_the_measured_noise_and_is_never_below_that_of_random_weights():
    noisy = limit_for("bf16", {"loss": 1e-3, "grad_norm": 1e-4})
    assert (noisy.loss, noisy.grad_norm) == (NOISE_FACTOR * 1e-3, LIMITS["bf16"].grad_norm)
    assert limit_for("bf16", {}) == UNMEASURED
    assert limit_for("fp32", {}) == LIMITS["fp32"]


def test_losses_that_differ_from_batch_to_batch_do_not_hide_a_lost_update():
    """Of a trained checkpoint in bf16, where the second figure is what losing one update does."""
    norms = (1.0,) * 4
    reference, lost = (
        made_up([1.085, 1.821, 1.697, 1.655], norms),
        made_up([1.085, 1.821, 1.697, 1.683], norms),
    )
    limit = Deviation(6.3e-3, 5.3e-2)
    moved = moved_for("bf16", limit)
    assert first_departure(lost, reference, limit, moved).startswith("step 3: the loss is 1.683")
    assert first_departure(made_up([1.085, 1.821, 1.697, 1.657], norms), reference, limit, moved) is None
    assert moved_for("bf16", LIMITS["bf16"]) == MOVED


def test_a_distance_is_the_mean_over_steps_in_multiples_of_what_a_step_allows():
    found = made_up([4.0, 4.1, 4.0], (1.0, 1.0, 1.1))
    apart = distance(found, STEADY)
    assert apart.loss == pytest.approx(0.1 / (2**0.5 * 4.0) / 3)
    assert apart.grad_norm == pytest.approx(0.1 / 3**0.5 / 3)


def test_a_mean_is_of_the_steps_that_all_have():
    mean = mean_of([STEADY, made_up([5.0, 6.0], (1.0, 3.0))])
    assert (mean.loss, mean.grad_norm) == ([4.5, 5.0], [1.0, 2.0])


def test_what_is_not_finite_is_infinitely_far():
    assert distance(made_up([4.0, float("nan"), 4.0]), STEADY).loss == float("inf")


def test_a_loss_that_moves_may_be_further_apart():
    """By MOVED times as much a nat, from the step in which it moved."""
    falls = made_up([4.0, 2.0, 3.0])
    apart = distance(made_up([4.0, 2.1, 3.0]), falls)
    assert apart.loss == pytest.approx(0.1 / (2**0.5 * 2.0 + MOVED * 2.0) / 3)
    later = distance(made_up([4.0, 2.0, 3.1]), falls)
    assert later.loss == pytest.approx(0.1 / (3**0.5 * 3.0 + MOVED * 2.0) / 3)
