"""Noise floor: how often equivalent trainings exceed it, and that a mistake exceeds it."""

from random import Random

import pytest

from bench.record.trajectory_noise import (
    FALSE_ALARMS,
    MIN_NOISE_FACTOR,
    ROUNDING,
    ControlledTraining,
    Signals,
    TrajectoryNoise,
    deviation_of,
)

STEPS = 6
TRAININGS = 4


def training(random, together, noise=1e-5, offset=0.0):
    """Training whose noise is the same in all steps (`together`), or drawn for every step."""

    def signal():
        common = random.gauss(0, noise)
        return [4.0 + offset + (common if together else random.gauss(0, noise)) for _ in range(STEPS)]

    return Signals(signal(), signal())


def crossings(together, seeds, *, offset=0.0, trials=250):
    """Share of comparisons in which any of TRAININGS trainings exceeds the floor."""
    random, exceeded = Random(5), 0
    for _ in range(trials):
        equivalent = [[training(random, together) for _ in range(6)] for _ in range(seeds)]
        floor = TrajectoryNoise(equivalent).floor(seeds, TRAININGS)
        deviations = [
            deviation_of(
                [ControlledTraining(training(random, together, offset=offset), seed) for seed in equivalent]
            )
            for _ in range(TRAININGS)
        ]
        exceeded += any(
            deviation.loss > floor.loss or deviation.grad_norm > floor.grad_norm for deviation in deviations
        )
    return exceeded / trials


@pytest.mark.parametrize("seeds", [1, 2])
def test_equivalent_trainings_rarely_exceed_the_noise_floor(seeds):
    """The worst case is noise that is the same in all steps; its share is FALSE_ALARMS."""
    assert 0.4 * FALSE_ALARMS < crossings(True, seeds) < 1.8 * FALSE_ALARMS
    assert crossings(False, seeds, trials=100) == 0


def test_several_seeds_find_a_mistake_that_one_does_not():
    mistake = 3.5e-5
    assert (
        crossings(True, 1, offset=mistake, trials=50) < 0.95 < crossings(True, 3, offset=mistake, trials=50)
    )


def test_noise_floor_is_at_least_the_float32_rounding():
    exact = training(Random(1), together=True, noise=0.0)
    floor = TrajectoryNoise([[exact] * 20] * 20).floor(20, 1)
    assert 0 < floor.loss < MIN_NOISE_FACTOR * ROUNDING
    near, far = (
        Signals([(1 + roundings * ROUNDING) * loss for loss in exact.loss], exact.grad_norm)
        for roundings in (1, 3)
    )
    below, above = (
        deviation_of([ControlledTraining(signals, [exact] * 20)]).loss / floor.loss for signals in (near, far)
    )
    assert below < 1 < above
