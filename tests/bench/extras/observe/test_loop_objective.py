"""Judgement of a loop's training objective, with and without knowledge of the divisor of gradients."""

import math

import numpy as np
import pytest

from bench.extras.observe.objective import (
    UNTRAINED,
    MicroStep,
    RankObjective,
    objective_mistake,
    reason_not_compared,
)
from bench.extras.observe.places import ROW_FACTOR

TOKENS, LOSS = 4, 2.0
"""Tokens of a call, and loss of a token."""


def call(place, *, weight, trained=TOKENS, **more):
    """Return one call of the model on the rank with index `place` in its sequence group."""
    positions = np.arange(place * TOKENS, (place + 1) * TOKENS)[None]
    labels = positions + 1
    labels[:, : TOKENS - trained] = UNTRAINED
    fields = {
        "ids": positions, "positions": positions, "labels": labels,
        "weighted_doubt": weight * trained * 0.5, "doubt": trained * 0.5, "loss_sum": trained * LOSS,
        "next_tokens": trained, "valid_tokens": trained, "other_targets": 0.0,
    }  # fmt: skip
    return MicroStep(**fields | more)


def rank(calls, losses, **more):
    valid = sum(call.trained_tokens for call in calls)
    return RankObjective(
        micro_steps=calls,
        losses=losses,
        valid_tokens=valid,
        is_stated=True,
        **{"gradient_factor": None} | more,
    )


def ranks_of(factor, *, ranks=2, sequence_ranks=2, micro_steps=1, **more):
    """Return ranks with right labels and equal weights: `factor` / count of all tokens."""
    weight = factor / (ranks * micro_steps * TOKENS)
    objectives = []
    for number in range(ranks):
        calls = [call(number % sequence_ranks, weight=weight) for _ in range(micro_steps)]
        objectives.append(rank(calls, [call.loss_sum * weight for call in calls], **more))
    return objectives


def one_trains_nothing(factor):
    trained = call(1, weight=factor / TOKENS)
    idle = rank([call(0, weight=0, trained=0)], [0.0], gradient_factor=1 / 2)
    return [idle, rank([trained], [trained.loss_sum * factor / TOKENS], gradient_factor=1 / 2)]


def two(*calls, **more):
    """Return ranks with one call each."""
    return [rank([micro_step], [1.0], **more) for micro_step in calls]


IMAGE = [
    (time * ROW_FACTOR + height) * ROW_FACTOR + width
    for time, height, width in [
        (0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5),
    ]
]  # fmt: skip
"""Positions of a token, an image of four patches, and three tokens."""
RIGHT, ZERO = call(0, weight=1), {"weight": 0, "doubt": 0.0, "loss_sum": 0.0}
OTHER_LABELS = call(0, weight=1, labels=np.zeros((1, TOKENS), dtype=int))
NOT_FINITE = "gradient of the logits of rank 1 is not finite"
CASES = {
    "added up over all of four ranks": (ranks_of(1, ranks=4, micro_steps=2), 2, None, "divided by 4"),
    "added up over two that share a sequence": (ranks_of(2, ranks=4), 2, None, "divided by 2"),
    "known to be added up": (ranks_of(1, gradient_factor=1.0), 2, None, None),
    "known to be added up, doubled": (ranks_of(2, gradient_factor=1.0), 2, "gradients are 2 times", None),
    "added up over two, averaged over two": (ranks_of(2, ranks=4, gradient_factor=1 / 2), 2, None, None),
    "positions of an image": (
        two(call(0, weight=1, positions=np.zeros((1, TOKENS), dtype=int) + 9), call(1, weight=1)),
        2, None, "do not determine the order",
    ),
    "labels around an image": (
        two(
            call(0, weight=1, positions=np.array([IMAGE[:4]])),
            call(1, weight=1, positions=np.array([IMAGE[4:]])),
        ),
        2, None, "divided by 2",
    ),
    "labels around an image, shifted in the shard": (
        two(
            call(0, weight=1, positions=np.array([IMAGE[:4]]), labels=np.array([[1, 2, 3, 0]])),
            call(1, weight=1, positions=np.array([IMAGE[4:]])),
        ),
        2, "trains position 3 on token 0, but the next token is 4", "divided by 2",
    ),
    "a teacher's logits": (two(RIGHT, call(1, weight=1, other_targets=0.5)), 2, None, "several targets"),
    "averaged and halved": (ranks_of(1, gradient_factor=1 / 2), 2, "gradients are 0.5 times", None),
    "averaged and doubled": (ranks_of(4, gradient_factor=1 / 2), 2, "gradients are 2 times", None),
    "doubled": (ranks_of(4), 2, "the stated loss is 4,", None),
    "a mean of four ranks of their own": (ranks_of(1, ranks=4, sequence_ranks=1), 1, None, "divided by 4"),
    "no mean of theirs": (ranks_of(2, ranks=4, sequence_ranks=1), 1, "the stated loss is 1,", None),
    "uneven": (two(RIGHT, call(1, weight=2)), 2, "weighs 2 times", "divided by 2"),
    "layers get half of the head's gradient": (
        two(RIGHT, call(1, weight=1, layer_share=0.5)), 2, "the layers get 0.5 times", "divided by 2",
    ),
    "other labels": (
        two(OTHER_LABELS, call(1, weight=1)), 2, "trains position 0 on token 0", "divided by 2",
    ),
    "a gradient is lost": (
        two(RIGHT, call(1, weight=1, weighted_doubt=math.nan), gradient_factor=1 / 2), 2, NOT_FINITE, None,
    ),
    "a logit is lost": (
        two(RIGHT, call(1, weight=1, doubt=math.nan), gradient_factor=1 / 2), 2, NOT_FINITE, None,
    ),
    "a loss of zero shows no weights": (
        [rank([call(place, **ZERO)], [0.0], gradient_factor=1 / 2) for place in range(2)], 2, None, None,
    ),
    "a rank trains on nothing": (one_trains_nothing(2), 2, None, None),
    "a rank trains on nothing, the other twice too much": (
        one_trains_nothing(4), 2, "gradients are 2 times", None,
    ),
    "no logits": ([rank([], [1.0])], 1, None, "no per-token logits"),
    "no gradient": (
        [rank([call(0, weight=0, trained=0)], [1.0])], 1, None, "gradient of all logits was zero",
    ),
}  # fmt: skip
"""Objectives of the ranks, ranks per sequence, what is wrong, and why something was not compared."""


@pytest.mark.parametrize("case", CASES)
def test_objective_names_mistakes_and_does_not_judge_the_unknown(case):
    ranks, sequence_ranks, mistake, unknown = CASES[case]
    firsts = range(0, len(ranks), sequence_ranks)
    groups = [[*range(first, first + sequence_ranks)] for first in firsts]
    wrong = objective_mistake(ranks, groups, "fp32")
    reason = reason_not_compared(ranks, groups, "fp32")
    assert mistake in wrong if mistake else wrong is None
    assert unknown in reason if unknown else reason is None
