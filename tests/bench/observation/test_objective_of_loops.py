"""What is said of a loop's loss where it is known who divides gradients, and where it is not."""

import math

import numpy as np
import pytest

from bench.observation.objective import UNTRAINED, MicroStep, RankObjective, not_compared, wrong_objective

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


def judged(ranks, sharers=2):
    groups = [[*range(first, first + sharers)] for first in range(0, len(ranks), sharers)]
    return wrong_objective(ranks, groups, "fp32"), not_compared(ranks, sharers, "fp32")


SUMMED = {
    "all of four ranks, two micro-steps": (ranks_of(1, ranks=4, micro_steps=2), "divided by 4"),
    "the two that share a sequence, of four": (ranks_of(2, ranks=4), "divided by 2"),
}


@pytest.mark.parametrize("case", SUMMED)
def test_a_loss_that_is_right_where_gradients_are_added_up_is_not_judged(case):
    ranks, said = SUMMED[case]
    wrong, reason = judged(ranks)
    assert wrong is None
    assert said in reason


UNDIVIDED = {"right, on four ranks": ranks_of(2, ranks=4), "twice too large": ranks_of(4, ranks=4)}


@pytest.mark.parametrize("case", UNDIVIDED)
def test_nothing_is_said_of_the_scale_where_nobody_knows_the_divisor(case):
    told = [RankObjective(**fields(each) | {"unknown_divisor": MPU}) for each in UNDIVIDED[case]]
    assert judged(told) == (None, MPU)


def fields(each):
    return {name: getattr(each, name) for name in RankObjective.__slots__}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (ranks_of(1, averages=True), "gradients are 0.5 times"),
        (ranks_of(4, averages=True), "gradients are 2 times"),
        (ranks_of(4), "the loop's loss is 4,"),
        (ranks_of(1, ranks=4, sharers=1), None),
        (ranks_of(2, ranks=4, sharers=1), "the loop's loss is 1,"),
    ],
)
def test_what_no_way_of_dividing_explains_is_found(ranks, said):
    wrong, _ = judged(ranks, sharers=2 if len(ranks) == 2 else 1)
    assert said in wrong if said else wrong is None


def test_weights_and_labels_are_judged_whoever_divides():
    uneven = [rank([call(place, weight=place + 1)], [1.0], unknown_divisor=MPU) for place in range(2)]
    assert "weighs 2 times" in judged(uneven)[0]
    wrong = call(0, weight=1, labels=np.zeros((1, TOKENS), dtype=int))
    shifted = [
        rank([wrong], [1.0], unknown_divisor=MPU),
        rank([call(1, weight=1)], [1.0], unknown_divisor=MPU),
    ]
    assert "trains position 0 on token 0" in judged(shifted)[0]


@pytest.mark.parametrize("lost", [{"pull": math.nan}, {"doubt": math.nan}], ids=["a gradient", "a logit"])
def test_logits_that_are_not_finite_are_told_with_their_rank(lost):
    ranks = [rank([call(0, weight=1)], [1.0]), rank([call(1, weight=1, **lost)], [1.0])]
    assert judged(ranks)[0] == "objective: the gradient of the logits of rank 1 is not finite"


def test_a_loss_of_zero_shows_no_weights_and_is_no_mistake():
    calls = [[call(place, weight=0, doubt=0.0, loss_sum=0.0)] for place in range(2)]
    assert judged([rank(each, [0.0], averages=True) for each in calls]) == (None, None)


@pytest.mark.parametrize(("factor", "said"), [(2, None), (4, "gradients are 2 times")])
def test_a_rank_that_trains_on_nothing_does_not_keep_the_others_from_being_judged(factor, said):
    trained = call(1, weight=factor / TOKENS)
    ranks = [
        rank([call(0, weight=0, trained=0)], [0.0], averages=True),
        rank([trained], [trained.loss_sum * factor / TOKENS], averages=True),
    ]
    wrong, reason = judged(ranks)
    assert reason is None
    assert said in wrong if said else wrong is None


@pytest.mark.parametrize(
    ("calls", "said"),
    [([], "no logits of each token"), ([call(0, weight=0, trained=0)], "gradient of all logits was zero")],
)
def test_why_nothing_is_known_is_said(calls, said):
    assert said in judged([rank(calls, [1.0])], sharers=1)[1]
