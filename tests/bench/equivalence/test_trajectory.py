"""How far two trainings are apart, what the noise is, and the first step in which they part."""

from types import SimpleNamespace

import pytest

from bench.equivalence.trajectory import (
    LIMITS,
    MOVED,
    ROUNDING,
    Limit,
    distance,
    first_departure,
    noise_floor,
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


def test_a_distance_is_the_least_limit_that_lets_a_training_pass():
    found, reference = made_up([5.0, 4.1, 3.2], (1.0, 1.1, 1.3)), made_up([5.0, 4.0, 3.0], (1.0, 1.0, 1.2))
    apart = distance(found, reference)
    assert first_departure(found, reference, apart.times(1.001)) is None
    for name in ("loss", "grad_norm"):
        least = {"loss": 1.0, "grad_norm": 1.0} | {name: 0.999 * getattr(apart, name)}
        assert name.split("_")[-1] in first_departure(found, reference, Limit(**least))


def test_what_is_not_finite_is_infinitely_far():
    assert distance(made_up([4.0, float("nan"), 4.0]), STEADY).loss == float("inf")


def test_a_loss_that_moves_may_be_further_apart():
    """By MOVED times as much a nat, from the step in which it moved."""
    falls = made_up([4.0, 2.0, 3.0])
    apart = distance(made_up([4.0, 2.1, 3.0]), falls)
    assert apart.loss == pytest.approx(0.1 / (2**0.5 * 2.0 + MOVED * 2.0))
    later = distance(made_up([4.0, 2.0, 3.1]), falls)
    assert later.loss == pytest.approx(0.1 / (3**0.5 * 3.0 + MOVED * 2.0))


def test_the_floor_is_the_largest_distance_of_any_two_and_no_less_than_one_rounding():
    near, far = made_up([4.0, 4.0, 4.1]), made_up([4.0, 4.0, 3.9], (1.0, 1.0, 1.2))
    floor = noise_floor([STEADY, near, far])
    assert floor.loss == distance(near, far).loss > distance(near, STEADY).loss
    assert floor.grad_norm == distance(STEADY, far).grad_norm
    assert noise_floor([STEADY, STEADY]) == Limit(ROUNDING, ROUNDING)
