"""Questions about a long text with known answers, generated or read from files. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.labels import value_label
from bench.config import ConfigError
from bench.training.text_files import text_files
from bench.training.text_rows import LONE_SURROGATE, LONGBENCH_KEYS, TASK_KEYS, read_rows
from bench.training.tokenizer import token_ids

SHARD = re.compile(r"-\d+-of-\d+$")


@dataclass(frozen=True, slots=True)
class Question:
    """Context and one or several queries about it, each with its answer."""

    task: str
    depth: float | None
    """Place of the asked statement in the context, from 0 to 1; None if it is not known."""
    context: str
    asked: tuple[tuple[str, str], ...]
    """Pairs of query and answer, in order. All but the last are part of what the model reads."""


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """Tokens of a question, of which the answers are scored."""

    ids: NDArray[Any]
    """Token IDs of context, queries and answers, int64."""
    is_answer: NDArray[Any]
    """Whether a token belongs to an answer, a Boolean for each of `ids`."""


class Encoder:
    """Tokenizer of a cell: a local tokenizer's IDs, or the bytes of the text."""

    def __init__(self, tokenizer: str | None, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def ids(self, text: str) -> NDArray[Any]:
        """Return the token IDs of a text."""
        if self.tokenizer is None:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) % self.vocab_size
        return token_ids(text, self.tokenizer, self.vocab_size).astype(np.int64)

    def encode(self, question: Question, max_tokens: int) -> EncodedQuestion:
        """Return the tokens of a question, at most `max_tokens`.

        A context that is too long loses its middle, as in LongBench. Raises ConfigError if the queries and
        answers alone are too long.
        """
        asked = [(self.ids(query), self.ids(answer)) for query, answer in question.asked]
        asked_tokens = sum(len(query) + len(answer) for query, answer in asked)
        room = max_tokens - asked_tokens
        if room < 1:
            raise ConfigError(
                f"seq_len={max_tokens - 1}: a question ({question.task}) has {asked_tokens} tokens without"
                " its context; take longer sequences"
            )
        context = self.ids(question.context)
        if len(context) > room:
            context = np.concatenate([context[: room // 2], context[len(context) - (room - room // 2) :]])
        pieces, flags = [context], [np.zeros(len(context), dtype=bool)]
        for query, answer in asked:
            pieces += [query, answer]
            flags += [np.zeros(len(query), dtype=bool), np.ones(len(answer), dtype=bool)]
        return EncodedQuestion(np.concatenate(pieces), np.concatenate(flags))


@cache
def read_questions(name: str, limit: int) -> tuple[Sequence[Question], Mapping[str, int]]:
    """Return the first `limit` questions of each task of files in LongBench's format, and each task's total.

    A row has the keys `context`, `input` and `answers`; the first answer is scored. Raises ConfigError for a
    row of another form among them.
    """
    asked, totals = [], Counter[str]()
    try:
        for task, place, row in _rows(name):
            totals[task] += 1
            if totals[task] <= limit:
                asked.append(_question(task, row, place))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.path={name}: cannot be read as questions ({error}); experiment=quality reads JSON lines"
            " with LongBench's keys: context, input, answers"
        ) from None
    if not asked:
        raise ConfigError(f"data.path={name}: holds no rows; name another file or folder")
    return asked, totals


def questions_line(name: str, limit: int) -> str:
    """Return a line for the plan on the questions of files that are asked."""
    asked, totals = read_questions(name, limit)
    return (
        f"data.path={name}: {len(asked)} of {sum(totals.values())} questions are asked, at most {limit}"
        f" (quality.questions) of each task ({len(totals)}): {value_label(', '.join(totals))}"
    )


def _rows(name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the task, by default the name of the file, the place and the content of each row."""
    for path in text_files(name).trained:
        file = path.relative_to(name) if Path(name).is_dir() else Path(path.name)
        for place, row in read_rows(path):
            named = [row.get(key) for key in TASK_KEYS] if isinstance(row, dict) else []
            task = "/".join(value for value in named if value and isinstance(value, str))
            yield task or SHARD.sub("", str(file.with_suffix(""))), place, row


def _question(task: str, row: Any, place: str) -> Question:
    keys = [*row] if isinstance(row, dict) else []
    if not set(LONGBENCH_KEYS) <= {*keys}:
        raise ValueError(f"{place} has the keys {value_label(', '.join(keys) or 'none')}")
    answers = row["answers"]
    answers = [answers] if isinstance(answers, str) else answers
    has_texts = all(isinstance(row[key], str) for key in ("context", "input"))
    if not (has_texts and isinstance(answers, Sequence) and answers and isinstance(answers[0], str)):
        raise ValueError(f"{place}: context and input must be texts, answers a text or a list of texts")
    if not answers[0]:
        raise ValueError(f"{place}: its first answer is empty")
    if LONE_SURROGATE.search("".join((row["context"], row["input"], answers[0]))):
        raise ValueError(f"{place}: has half of a surrogate pair, which UTF-8 cannot hold")
    query = f"\n\nQuestion: {row['input']}\nAnswer:"
    return Question(task, None, row["context"], ((query, f" {answers[0]}"),))
