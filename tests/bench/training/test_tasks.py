"""Generated questions fill a sequence, state the asked value once at its depth, and give nothing away."""

import re
from collections import Counter

import pytest

from bench.config import ConfigError
from bench.training.chunks import split_text, with_retrieved_chunks
from bench.training.questions import Encoder, Question
from bench.training.tasks import (
    BYTES,
    CHAINS,
    PAIRS,
    SENTENCES,
    TASKS,
    TRAINING_QUERIES,
    TaskGenerator,
    questions_of,
)
from tests.support.cells import make_cell

ENCODER = Encoder(None, 256)
GENERATOR = TaskGenerator(ENCODER, 7)
TOKENS = 512
VALUES = {"needle": 1, "key_value": PAIRS, "variables": CHAINS}
"""Number of values that the text of a task states."""


def texts_of(task, count=40, depth=0.5, tokens=TOKENS):
    return [GENERATOR.question(task, number, tokens, depth) for number in range(count)]


@pytest.mark.parametrize("tokens", [64, TOKENS])
@pytest.mark.parametrize("task", TASKS)
def test_context_states_the_answer(task, tokens):
    for question in texts_of(task, tokens=tokens):
        ((query, answer),) = question.asked
        key = query.removeprefix("?")
        stated = dict(re.findall("#(.)(.)", question.context))
        assert len([value for value in stated.values() if value.islower()]) == VALUES[task]
        value = stated[key]
        assert (stated[value] if value.isupper() else value) == answer
        if task == "variables":  # a variable is set before it is used
            assert question.context.index(f"#{value}") < question.context.index(f"#{key}")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [64, 256, 2048])
def test_question_nearly_fills_the_sequence(task, tokens):
    longest = max(map(len, BYTES.haystack)) + 1
    for number in range(10):
        length = len(ENCODER.encode(GENERATOR.question(task, number, tokens, 0.3), tokens).ids)
        assert tokens - 2 * longest < length <= tokens


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_asked_statement_stands_at_its_depth(depth):
    for task in ("needle", "key_value"):
        for question in texts_of(task, depth=depth):
            place = question.context.index(f"#{question.asked[0][0][1]}") / len(question.context)
            assert place == pytest.approx(depth, abs=0.06)


@pytest.mark.parametrize(("questions", "depths"), [(2, {0.25, 0.75}), (10, {0.1, 0.3, 0.5, 0.7, 0.9})])
def test_few_questions_cover_the_whole_context(questions, depths):
    cell = make_cell("seq_len=256", f"quality.questions={questions}")
    asked = questions_of(cell, ENCODER)
    assert len(asked) == len(TASKS) * questions
    assert {question.depth for question in asked} == depths


def test_neither_order_nor_frequency_gives_the_answer_away():
    """The asked key is each of the listed ones equally often, also in training."""
    places, first_queries = Counter(), Counter()
    for number in range(400):
        question = GENERATOR.question("key_value", number, 64, 0.5, asks_several=True)
        keys = re.findall("#(.)", question.context)
        asked = [query[1] for query, _ in question.asked]
        assert len(asked) == TRAINING_QUERIES
        places[keys.index(asked[-1])] += 1
        first_queries[keys.index(asked[0])] += 1
    assert min(places.values()) > 60, places
    assert min(first_queries.values()) > 60, first_queries


def test_training_questions_are_of_all_tasks_and_lengths():
    lengths = [len(GENERATOR.training_question(number, 257).ids) for number in range(200)]
    assert max(lengths) <= 257
    assert 0.3 < sum(length < 200 for length in lengths) / len(lengths) < 0.6
    again = TaskGenerator(ENCODER, 7).training_question(3, 257)
    assert (again.ids == GENERATOR.training_question(3, 257).ids).all()
    assert not (again.ids[:40] == TaskGenerator(ENCODER, 8).training_question(3, 257).ids[:40]).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("seq_len=16",), r"seq_len=16: a question \(variables\) has"),
        (("data.packing=documents",), "data.packing: data=tasks generates its questions and has none"),
        (("data.prompt_tokens=5",), "data.prompt_tokens: data=tasks generates"),
    ],
)
def test_data_that_questions_do_not_have_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        make_cell("data=tasks", *words)


def test_sentences_are_those_of_ruler():
    """With a tokenizer keys are words and values numbers, whose statement the query quotes."""
    generator = TaskGenerator(ENCODER, 0)
    generator.form = SENTENCES
    question = generator.question("needle", 0, 600, 0.5)
    ((query, answer),) = question.asked
    key = re.search(r"number for (\S+) mentioned", query)[1]
    assert f"One of the special magic numbers for {key} is: {answer.strip()}." in question.context
    assert re.fullmatch(r" \d{7}", answer)


def test_long_context_loses_its_middle():
    question = Question("file", None, "a" * 50 + "b" * 50, (("?", "xy"),))
    encoded = ENCODER.encode(question, 43)
    assert bytes(encoded.ids.tolist()) == b"a" * 20 + b"b" * 20 + b"?xy"
    assert encoded.is_answer.tolist() == [False] * 41 + [True] * 2
    with pytest.raises(ConfigError, match=r"seq_len=2: a question \(file\) has 3 tokens"):
        ENCODER.encode(question, 3)


def test_chunks_hold_the_text_and_retrieval_finds_the_place():
    found = 0
    for question in texts_of("key_value", 20):
        pieces = split_text(question.context, ENCODER, 32)
        assert " ".join(pieces).split() == question.context.split()
        assert max(map(len, pieces)) <= 32
        short = with_retrieved_chunks(question, ENCODER, chunks=2, chunk_tokens=32)
        assert len(short.context) <= 2 * 32 + 1
        found += f"#{question.asked[0][0][1]}" in short.context
    assert found == 20
    everything = with_retrieved_chunks(question, ENCODER, chunks=100, chunk_tokens=32)
    assert everything.context == question.context
