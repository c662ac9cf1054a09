"""Judgement of a loop's training objective: mistakes, and reasons why it is not judged."""

import numpy as np
import pytest

from bench.extras.observe.objective import UNTRAINED, MicroStep, RankObjective, judge_objective

TOKENS = 4


def call(place, *, weight=1.0, trained=TOKENS, rows=1, **more):
    """Return one call of the model on the rank with index `place` in its sequence group.

    `weight` and `trained` may have a number for each row.
    """
    positions = np.arange(place * TOKENS, (place + 1) * TOKENS)[None].repeat(rows, axis=0)
    counts = np.broadcast_to(trained, (rows,))[:, None]
    is_trained = np.arange(TOKENS) >= TOKENS - counts
    weights = np.broadcast_to(np.array(weight, dtype=float).reshape(-1, 1), positions.shape)
    fields = {
        "ids": positions, "positions": positions, "labels": np.where(is_trained, positions + 1, UNTRAINED),
        "weights": np.where(is_trained, weights, np.nan), "valid_tokens": int(is_trained.sum()),
        "softmax_error": 0.0,
    }  # fmt: skip
    return MicroStep(**fields | more)


def rank(calls, **more):
    fields = {"micro_steps": calls, "valid_tokens": sum(call.valid_tokens or 0 for call in calls)}
    return RankObjective(**fields | {"is_stated": True, "gradient_factor": 1 / 2} | more)


def ranks_of(factor, *, ranks=2, sequence_ranks=2, micro_steps=1, gradient_factor=1 / 2):
    """Return ranks with right labels and equal weights: `factor` / count of all tokens."""
    weight = factor / (ranks * micro_steps * TOKENS)
    places = [number % sequence_ranks for number in range(ranks)]
    calls = [[call(place, weight=weight) for _ in range(micro_steps)] for place in places]
    return [rank(of_rank, gradient_factor=gradient_factor) for of_rank in calls]


def two(*calls, **more):
    """Return ranks with one call each."""
    return [rank([micro_step], **more) for micro_step in calls]


PER_ROW = {"rows": 2, "trained": (4, 1)}
LABELS_IN_ROW = np.array([[1, 2, 3, 0]])
CASES = {
    "added up over two, averaged over two": (ranks_of(2, ranks=4), 2, None, None),
    "averaged and halved": (ranks_of(1), 2, "gradients are 0.5 times", None),
    "a sum": (ranks_of(16), 2, "gradients are 8 times", None),
    "a weight of the loss": (ranks_of(0.6), 2, None, "0.3 times those of the mean"),
    "added up, and the scale is not known": (ranks_of(1, gradient_factor=None), 2, None, None),
    "each rank states the count of all": (
        [rank(of.micro_steps, valid_tokens=8.0) for of in ranks_of(2)], 2, None, None,
    ),
    "tokens are left out on purpose": (
        two(
            call(0, labels=np.array([[1, UNTRAINED, 3, UNTRAINED]]), valid_tokens=2, weight=1 / 3),
            call(1, weight=1 / 3),
        ),
        2, None, None,
    ),
    "pairs of ranks divide by their own counts": (
        two(*(call(0, weight=1 / count, trained=count // 2) for count in (2, 8, 2, 8))), 1,
        "weighs 4 times", None,
    ),
    "each row divides by its own count": (
        two(*(call(place, weight=(1 / 4, 1), **PER_ROW) for place in (0, 1))), 2,
        "a token of rank 1, row 1 weighs 4 times one of rank 0, row 0", None,
    ),
    "each tile divides by its own count": (
        two(
            call(0, weights=np.array([[1.0, 1 / 3, np.nan, 1 / 3]])),
            call(
                1, weights=np.array([[1 / 2, 1 / 2, 1.0, np.nan]]), trained=3,
                labels=np.array([[5, 6, 7, UNTRAINED]]),
            ),
        ),
        2, "a token of rank 1, tile 1 weighs 3 times one of rank 0, tile 1", None,
    ),
    "chosen weights of rows": (
        two(*(call(place, weight=(1, 2), **PER_ROW) for place in (0, 1))), 2, None, "chosen as in a",
    ),
    "chosen weights of tokens": (
        two(call(0, weights=np.array([[1.0, 1.0, 2.0, 2.0]])), call(1)), 2, None, "chosen as in a",
    ),
    "another term of the logits": (
        two(call(0), call(1, softmax_error=0.01)), 2, None, "of a plain cross-entropy",
    ),
    "labels of the shard, loss not stated": (
        two(call(0, labels=LABELS_IN_ROW), call(1), is_stated=False), 2, None, "did not state its loss",
    ),
    "labels of the shard in a document": (
        two(
            call(0, positions=np.array([[0, 1, 2, 0]]), labels=LABELS_IN_ROW),
            call(1, positions=np.array([[1, 2, 3, 4]])),
        ),
        2, "trains position 3 on token 0, but the next token is 4", None,
    ),
    "labels cut off at the end of the shard": (
        two(call(0, labels=np.array([[1, 2, 3, UNTRAINED]]), valid_tokens=None), call(1)), 2,
        "the last token of each shard is not trained on", None,
    ),
    "plain labels of the model, loss not stated": (
        two(
            call(0, labels=np.array([[1, 2, 3, UNTRAINED]]), weights=np.ones((1, 4))), call(1),
            is_stated=False,
        ),
        2, "the last token of each shard is not trained on", None,
    ),
    "a rank trains no token": (
        two(call(0, weight=1 / 4), call(1, labels=np.full((1, 4), UNTRAINED), trained=3, weight=1 / 4)), 2,
        None, "4 tokens have a gradient, and 7 are valid",
    ),
    "no order": (
        two(call(0, positions=np.zeros((1, TOKENS), dtype=int) + 9), call(1)), 2, None, "do not determine",
    ),
    "a loss of zero shows no weights": (
        two(*(call(place, weight=np.nan) for place in (0, 1))), 2, None, "near 0",
    ),
    "no logits": ([rank([])], 1, None, "no logits of each token"),
    "no gradient": (two(call(0, trained=0), call(1, trained=0)), 2, None, "gradient of all logits was zero"),
    "ids are not known": (two(call(0), call(1), reason="embeddings"), 2, None, "embeddings"),
}  # fmt: skip
"""Objectives of the ranks, ranks per sequence, what is wrong, and why something was not compared."""


@pytest.mark.parametrize("case", CASES)
def test_objective_names_mistakes_and_does_not_judge_the_unknown(case):
    ranks, sequence_ranks, mistake, unknown = CASES[case]
    firsts = range(0, len(ranks), sequence_ranks)
    groups = [[*range(first, first + sequence_ranks)] for first in firsts]
    verdict = judge_objective(ranks, groups, "fp32")
    assert mistake in verdict.mistake if mistake else verdict.mistake is None
    assert unknown in verdict.reason if unknown else verdict.reason is None
