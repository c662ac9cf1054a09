"""Generated questions in the manner of RULER (arXiv:2404.06654): needle, key-value pairs, variable tracking.

Statements stand in a haystack of repeated sentences. With a tokenizer they are RULER's sentences; without
one, keys and values are single bytes, so that a small model can learn the tasks. docs/quality.md says where
they differ from RULER. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from bench.config import Cell, ConfigError
from bench.training.questions import EncodedQuestion, Encoder, Question, read_questions

FIRST_NUMBER = 2**31
"""Number of the first scored question; training uses smaller ones."""
PAIRS = 4
"""Key-value pairs of the task `key_value`, of which one is asked; as in RULER's niah_multikey_1."""
CHAINS = 2
"""Chains of the task `variables`, each of a value and one variable that is set to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Wording of statements, queries and answers. Formats have `key` and `value`, or `other`, a variable."""

    haystack: tuple[str, ...]
    """Sentences that are repeated in turn."""
    keys: Sequence[str]
    values: Sequence[str] | range
    pair: str
    pair_query: str
    variable: str
    alias: str
    variable_query: str
    answer: str
    shortest_tokens: int
    """Length of the shortest questions in training."""

    def random_keys(self, count: int, random: np.random.Generator) -> list[str]:
        """Return different keys."""
        return [self.keys[int(index)] for index in random.permutation(len(self.keys))[:count]]

    def random_value(self, random: np.random.Generator) -> str:
        """Return a value."""
        return str(self.values[int(random.integers(len(self.values)))])


_ADJECTIVES = "amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow odd plain quiet"
_NOUNS = (
    "acorn basin candle dragon engine forest garden harbor island jacket kettle ladder marble needle orchard"
)
SENTENCES = Form(
    haystack=(
        "The grass is green.",
        "The sky is blue.",
        "The sun is yellow.",
        "Here we go.",
        "There and back again.",
    ),
    keys=[f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()],
    values=range(10**6, 10**7),
    pair="One of the special magic numbers for {key} is: {value}.",
    pair_query="\nWhat is the special magic number for {key} mentioned in the provided text? The special"
    " magic number for {key} mentioned in the provided text is",
    variable="VAR {key} = {value}.",
    alias="VAR {key} = VAR {other}.",
    variable_query="\nWhat is the value of VAR {key} in the text above? The value of VAR {key} is",
    answer=" {value}",
    shortest_tokens=512,
)
"""Wording for models with a tokenizer, close to RULER's."""
BYTES = Form(
    haystack=tuple(sentence.lower() for sentence in SENTENCES.haystack),
    keys=ascii_uppercase,
    values=ascii_lowercase,
    pair="#{key}{value}",
    pair_query="?{key}",
    variable="#{key}{value}",
    alias="#{key}{other}",
    variable_query="?{key}",
    answer="{value}",
    shortest_tokens=64,
)
"""Wording for models of bytes: a key is a capital letter and a value a small letter, one token each."""


@dataclass(frozen=True, slots=True)
class Statements:
    """Statements of a question before they are placed in the haystack."""

    asked: str
    """Statement whose place is the depth of the question."""
    after: str | None
    """Statement that stands anywhere after `asked`; None without one."""
    others: Sequence[tuple[str, ...]]
    """Distractors; statements of one tuple stand in this order."""
    queries: tuple[tuple[str, str], ...]
    """Queries and answers. The last one is about `asked`."""


def _needle(form: Form, random: np.random.Generator) -> Statements:
    (key,), value = form.random_keys(1, random), form.random_value(random)
    query = form.pair_query.format(key=key), form.answer.format(value=value)
    return Statements(form.pair.format(key=key, value=value), None, (), (query,))


def _key_value(form: Form, random: np.random.Generator) -> Statements:
    pairs = {key: form.random_value(random) for key in form.random_keys(PAIRS, random)}
    asked, *others = (form.pair.format(key=key, value=value) for key, value in pairs.items())
    queries = [
        (form.pair_query.format(key=key), form.answer.format(value=value)) for key, value in pairs.items()
    ]
    return Statements(asked, None, [(other,) for other in others], tuple(reversed(queries)))


def _variables(form: Form, random: np.random.Generator) -> Statements:
    names = form.random_keys(2 * CHAINS, random)
    chains, queries = [], []
    for key, other in zip(names[:CHAINS], names[CHAINS:], strict=True):
        value = form.random_value(random)
        chains.append((form.variable.format(key=other, value=value), form.alias.format(key=key, other=other)))
        queries.append((form.variable_query.format(key=key), form.answer.format(value=value)))
    (asked, after), *others = chains
    return Statements(asked, after, others, tuple(reversed(queries)))


TASKS: Mapping[str, Callable[[Form, np.random.Generator], Statements]] = {
    "needle": _needle,
    "key_value": _key_value,
    "variables": _variables,
}


TRAINING_SHARES = (0.1, 0.5, 0.4)
"""Shares of the tasks in training, in the order of TASKS."""
SHORT_SHARE = 0.5
"""Share of the questions in training that do not fill the sequence."""
TRAINING_QUERIES = 4
"""Queries of a question in training. Keys may repeat; else a model could answer by elimination."""


class TaskGenerator:
    """Generator of questions that fill a sequence, equal for equal seeds."""

    def __init__(self, encoder: Encoder, seed: int) -> None:
        self.encoder, self.seed = encoder, seed
        self.form = BYTES if encoder.tokenizer is None else SENTENCES
        sentence_tokens = [len(encoder.ids(f" {sentence}")) for sentence in self.form.haystack]
        self.tokens_per_sentence = sum(sentence_tokens) / len(sentence_tokens)

    def question(
        self, task: str, number: int, tokens: int, depth: float, *, asks_several: bool = False
    ) -> Question:
        """Return question `number` of a task, which has at most `tokens` tokens and nearly as many.

        Raises ConfigError if its statements and queries alone have more.

        Args:
            task: Name of the task, a key of TASKS.
            number: Number of the question, which decides its random choices together with the seed.
            tokens: Largest number of tokens.
            depth: Place of the asked statement, from 0 (first) to 1 (last).
            asks_several: Ask TRAINING_QUERIES times for a random key, not once for the key at `depth`.
        """
        random = np.random.default_rng([self.seed, [*TASKS].index(task), number])
        statements = TASKS[task](self.form, random)
        count = len(statements.queries)
        order = random.integers(0, count, TRAINING_QUERIES) if asks_several else [-1]
        asked = tuple(statements.queries[int(index)] for index in order)
        repeat = len(self.form.haystack)
        first, seed = int(random.integers(repeat)), int(random.integers(2**32))
        sentences = max(0, int(tokens / self.tokens_per_sentence))
        while True:
            haystack = [self.form.haystack[(first + i) % repeat] for i in range(sentences)]
            context = _place(statements, haystack, depth, np.random.default_rng(seed))
            question = Question(task, depth, context, asked)
            excess = self._tokens(question) - tokens
            if excess <= 0:
                return question
            if sentences == 0:
                raise ConfigError(
                    f"seq_len={tokens - 1}: a question ({task}) has {tokens + excess} tokens; take longer"
                    " sequences"
                )
            sentences -= max(1, min(sentences, int(excess / self.tokens_per_sentence)))

    def training_question(self, number: int, max_tokens: int) -> EncodedQuestion:
        """Return the tokens of a question to train on, of a random task, depth and length.

        Half of the questions fill `max_tokens`, the others are shorter.
        """
        random = np.random.default_rng([self.seed, number])
        task = str(random.choice([*TASKS], p=TRAINING_SHARES))
        tokens = max_tokens
        if random.random() < SHORT_SHARE:
            tokens = int(random.integers(min(self.form.shortest_tokens, max_tokens), max_tokens + 1))
        question = self.question(task, number, tokens, float(random.random()), asks_several=True)
        return self.encoder.encode(question, max_tokens)

    def _tokens(self, question: Question) -> int:
        texts = [question.context, *(text for pair in question.asked for text in pair)]
        return sum(len(self.encoder.ids(text)) for text in texts)


def _place(statements: Statements, haystack: Sequence[str], depth: float, random: np.random.Generator) -> str:
    """Return the haystack with the statements between its sentences."""
    slots = len(haystack) + 1
    # A group gets one place for each of its statements: a slot, and a random number that orders the slot.
    asked_place = round(depth * (slots - 1)), float(random.random())
    placed = [(asked_place, statements.asked)]
    if statements.after is not None:
        slot = int(random.integers(asked_place[0], slots))
        is_same = slot == asked_place[0]
        placed.append(((slot, float(random.uniform(asked_place[1] if is_same else 0, 1))), statements.after))
    for group in statements.others:
        places = sorted((int(random.integers(slots)), float(random.random())) for _ in group)
        placed += zip(places, group, strict=True)
    by_slot: list[list[str]] = [[] for _ in range(slots)]
    for (slot, _), statement in sorted(placed):
        by_slot[slot].append(statement)
    sentences = [[sentence] for sentence in haystack] + [[]]
    pairs = zip(by_slot, sentences, strict=True)
    return " ".join(text for placed_here, sentence in pairs for text in (*placed_here, *sentence))


def questions_of(cell: Cell, encoder: Encoder) -> list[Question]:
    """Return the questions that a cell scores: those of its file, or generated ones of every task."""
    quality = cell.quality
    if cell.data.path is not None:
        return [*read_questions(cell.data.path, quality.questions)[0]]
    generator, tokens = TaskGenerator(encoder, cell.seed), cell.seq_len + 1
    count = min(quality.depths, quality.questions)
    depths = [(place + 0.5) / count for place in range(count)]
    return [
        generator.question(task, FIRST_NUMBER + number, tokens, depths[number % count])
        for task in TASKS
        for number in range(quality.questions)
    ]
