"""The user's words become values, or one line that says what to type instead."""

from typing import Annotated

import pytest

from bench.config import ConfigError, Seconds, positive_rule
from bench.request import values


@pytest.mark.parametrize(
    ("word", "count"),
    [("8k", 8192), ("8K", 8192), ("96k", 98304), ("1m", 2**20), (8192, 8192), ("8192", 8192), (8e3, 8000)],
)
def test_a_length_counts_tokens_with_k_as_1024(word, count):
    assert values.tokens("seq_len", word) == count


@pytest.mark.parametrize(
    "word",
    [
        *("8Ki", "1.5k", 0, -1, 8.5, float("nan"), float("inf"), None, "", True, ["8k", "64k"], "8k,64k"),
        *("0x10", "8kk", " 8k ", "\uff18k", 10**30, "1e6k", "-8k", {}),
    ],
)
def test_no_other_length_is_taken(word):
    with pytest.raises(ConfigError, match=r"seq_len=.*write for example seq_len=8k"):
        values.tokens("seq_len", word)


def test_several_lengths_in_one_run_point_to_the_sweep_flag():
    with pytest.raises(ConfigError, match="-m seq_len=8k,64k"):
        values.tokens("seq_len", ["8k", "64k"])


@pytest.mark.parametrize("word", [0, -1, 1.5, "two", None, True, [1]])
def test_whole_numbers_start_at_their_least(word):
    with pytest.raises(ConfigError, match="batch="):
        values.whole("batch", word)


@pytest.mark.parametrize("word", [0, -1, float("nan"), "nan", float("inf"), "20s", "\ud800", None, True, [1]])
@pytest.mark.parametrize("rule", [Seconds, Annotated[float, positive_rule(1)]])
def test_seconds_and_other_numbers_are_positive_and_finite(word, rule):
    with pytest.raises(ConfigError, match=r"x=.*: must be a positive number"):
        values.checked("x", word, rule)


@pytest.mark.parametrize(("word", "number"), [("4", 4), (4.0, 4), (4, 4)])
def test_a_number_may_come_as_text_which_variables_of_the_environment_are(word, number):
    assert values.whole("batch", word) == values.checked("x", word, Seconds) == number


def test_an_unknown_choice_names_its_nearest_neighbour():
    with pytest.raises(ConfigError, match=r"did you mean strategy=ulysses\?"):
        values.choice("strategy", "Ulyses", ["local", "ulysses", "ring"])
