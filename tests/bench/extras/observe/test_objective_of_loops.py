"""What is said of a loop's loss where it is known who divides gradients, and where it is not."""

import math

import numpy as np
import pytest

from bench.extras.observe.objective import UNTRAINED, MicroStep, RankObjective, not_compared, wrong_objective

TOKENS, LOSS = 4, 2.0
"""Of each call, and of each token."""
MPU = "it is not known what gradients are divided by"


def call(place, *, weight, trained=TOKENS, **more):
    """One call of the model on one rank of several that share a sequence."""
    positions = np.arange(place * TOKENS, (place + 1) * TOKENS)[None]
    labels = positions + 1
    labels[:, : TOKENS - trained] = UNTRAINED
    found = {
        "ids": positions, "positions": positions, "labels": labels, "pull": weight * trained * 0.5,
        "doubt": trained * 0.5, "loss_sum": trained * LOSS, "summed": trained, "valid_tokens": trained,
    }  # fmt: skip
    return MicroStep(**found | more)


def rank(calls, losses, **more):
    valid = sum(each.trained for each in calls)
    return RankObjective(
        micro_steps=calls, losses=losses, valid_tokens=valid, is_told=True, **{"averages": False} | more
    )


def ranks_of(times, *, ranks=2, sharers=2, micro_steps=1, **more):
    """Right labels and equal weights; each rank's loss is its sum times `times` over the count of all."""
    weight = times / (ranks * micro_steps * TOKENS)
    found = []
    for number in range(ranks):
        calls = [call(number % sharers, weight=weight) for _ in range(micro_steps)]
        found.append(rank(calls, [each.loss_sum * weight for each in calls], **more))
    return found


def one_trains_nothing(factor):
    trained = call(1, weight=factor / TOKENS)
    idle = rank([call(0, weight=0, trained=0)], [0.0], averages=True)
    return [idle, rank([trained], [trained.loss_sum * factor / TOKENS], averages=True)]


def two(*calls, **more):
    """Two ranks of one call each."""
    return [rank([each], [1.0], **more) for each in calls]


RIGHT, ZERO = call(0, weight=1), {"weight": 0, "doubt": 0.0, "loss_sum": 0.0}
OTHER_LABELS = call(0, weight=1, labels=np.zeros((1, TOKENS), dtype=int))
NOT_FINITE = "objective: the gradient of the logits of rank 1 is not finite"
CASES = {
    "added up over all of four ranks": (ranks_of(1, ranks=4, micro_steps=2), 2, None, "divided by 4"),
    "added up over two that share a sequence": (ranks_of(2, ranks=4), 2, None, "divided by 2"),
    "no divisor known, right": (ranks_of(2, ranks=4, unknown_divisor=MPU), 2, None, MPU),
    "no divisor known, twice too large": (ranks_of(4, ranks=4, unknown_divisor=MPU), 2, None, MPU),
    "averaged and halved": (ranks_of(1, averages=True), 2, "gradients are 0.5 times", None),
    "averaged and doubled": (ranks_of(4, averages=True), 2, "gradients are 2 times", None),
    "doubled": (ranks_of(4), 2, "the loop's loss is 4,", None),
    "a mean of four ranks of their own": (ranks_of(1, ranks=4, sharers=1), 1, None, "divided by 4"),
    "no mean of theirs": (ranks_of(2, ranks=4, sharers=1), 1, "the loop's loss is 1,", None),
    "uneven": (two(RIGHT, call(1, weight=2), unknown_divisor=MPU), 2, "weighs 2 times", MPU),
    "other labels": (
        two(OTHER_LABELS, call(1, weight=1), unknown_divisor=MPU), 2, "trains position 0 on token 0", MPU,
    ),
    "a gradient is lost": (two(RIGHT, call(1, weight=1, pull=math.nan), averages=True), 2, NOT_FINITE, None),
    "a logit is lost": (two(RIGHT, call(1, weight=1, doubt=math.nan), averages=True), 2, NOT_FINITE, None),
    "a loss of zero shows no weights": (
        [rank([call(place, **ZERO)], [0.0], averages=True) for place in range(2)], 2, None, None,
    ),
    "a rank trains on nothing": (one_trains_nothing(2), 2, None, None),
    "a rank trains on nothing, the other twice too much": (
        one_trains_nothing(4), 2, "gradients are 2 times", None,
    ),
    "no logits": ([rank([], [1.0])], 1, None, "no logits of each token"),
    "no gradient": (
        [rank([call(0, weight=0, trained=0)], [1.0])], 1, None, "gradient of all logits was zero",
    ),
}  # fmt: skip
"""What the ranks saw, how many share a sequence, what is wrong and why something was not compared."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_and_what_is_not_known_is_not_judged(case):
    ranks, sharers, said, unknown = CASES[case]
    groups = [[*range(first, first + sharers)] for first in range(0, len(ranks), sharers)]
    wrong, reason = wrong_objective(ranks, groups, "fp32"), not_compared(ranks, sharers, "fp32")
    assert said in wrong if said else wrong is None
    assert unknown in reason if unknown else reason is None
