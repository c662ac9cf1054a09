"""The floor: how often an equivalent training is beyond it, and that a mistake is."""

from random import Random

import pytest

from bench.record.trajectory_noise import (
    FALSE_ALARMS,
    LEAST_FACTOR,
    ROUNDING,
    Draw,
    Signals,
    TrajectoryNoise,
    distance_of,
)

STEPS = 6
TRAININGS = 4


def training(random, together, noise=1e-5, offset=0.0):
    """Steps whose noise is one draw for all of them, or one each."""

    def signal():
        common = random.gauss(0, noise)
        return [4.0 + offset + (common if together else random.gauss(0, noise)) for _ in range(STEPS)]

    return Signals(signal(), signal())


def crossings(together, seeds, *, offset=0.0, trials=250):
    """The share of comparisons in which any of TRAININGS crosses the floor."""
    random, beyond = Random(5), 0
    for _ in range(trials):
        equivalent = [[training(random, together) for _ in range(6)] for _ in range(seeds)]
        floor = TrajectoryNoise(equivalent).floor(seeds, TRAININGS)
        apart = [
            distance_of([Draw(training(random, together, offset=offset), each) for each in equivalent])
            for _ in range(TRAININGS)
        ]
        beyond += any(each.loss > floor.loss or each.grad_norm > floor.grad_norm for each in apart)
    return beyond / trials


@pytest.mark.parametrize("seeds", [1, 2])
def test_equivalent_trainings_cross_the_floor_as_rarely_as_it_says(seeds):
    """Steps that all move together are the worst case, in which the share is FALSE_ALARMS."""
    assert 0.4 * FALSE_ALARMS < crossings(True, seeds) < 1.8 * FALSE_ALARMS
    assert crossings(False, seeds, trials=100) == 0


def test_seeds_together_find_what_one_does_not():
    mistake = 3.5e-5
    assert (
        crossings(True, 1, offset=mistake, trials=50) < 0.95 < crossings(True, 3, offset=mistake, trials=50)
    )


def test_the_floor_is_no_less_than_some_roundings():
    exact = training(Random(1), together=True, noise=0.0)
    floor = TrajectoryNoise([[exact] * 20] * 20).floor(20, 1)
    assert 0 < floor.loss < LEAST_FACTOR * ROUNDING
    near, far = (
        Signals([(1 + by * ROUNDING) * each for each in exact.loss], exact.grad_norm) for by in (1, 3)
    )
    apart = [distance_of([Draw(each, [exact] * 20)]).loss / floor.loss for each in (near, far)]
    assert apart[0] < 1 < apart[1]
