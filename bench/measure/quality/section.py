"""Section, checks and comparison of the quality pass: scores of questions with known answers. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.common.rules import PositiveInt
from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, FaultOrigin, PassFacts, RankReport, join_by_rank
from bench.training.questions import read_questions
from bench.training.tasks import TASKS

EXPERIMENT = "quality"
"""Only experiment in which the pass runs."""
TRAINING_DATA = "tasks"
"""Data of the cells that train the model, which score nothing."""
CHECK = "log-likelihood of answers"
MISTAKE_NATS = 0.3
"""Change of a token's mean log-likelihood in a group of answers by a known mistake, in nats.

The faults of tests/bench/measure/quality/test_faults.py change it by 0.32 or more, on random weights."""
FORWARD_SHARE = 1 / 3
"""Share of a training step that its forward pass takes, for the estimate of a cell's time."""


def is_scored(cell: Cell) -> bool:
    """Return whether a cell scores its model."""
    return cell.experiment == EXPERIMENT and cell.data.name != TRAINING_DATA


def scoring_steps(cell: Cell) -> float:
    """Return the number of training steps that take as long as the scoring of all questions."""
    if not is_scored(cell):
        return 0.0
    questions = cell.quality.questions * len(TASKS)
    if cell.data.path is not None:
        questions = len(read_questions(cell.data.path, cell.quality.questions)[0])
    return FORWARD_SHARE * questions / cell.sequences_per_step


class Scores(Struct, frozen=True, kw_only=True):
    """Scores of all questions in one form: with the whole context, or with retrieved chunks."""

    tokens: list[int]
    """Tokens of each question that the model reads, without padding."""
    log_likelihood: list[float | None]
    """Log-likelihood of each answer in nats, the sum over its tokens; null if it is not finite."""
    wrong_tokens: list[int]
    """Number of tokens of each answer for which another token is more likely; 0 for a right answer."""
    question_ms: list[float]
    """Median milliseconds of a forward pass divided by its questions, by rank."""

    @property
    def right_share(self) -> float:
        """Share of questions whose answer is right token by token."""
        return self.wrong_tokens.count(0) / len(self.wrong_tokens)


class QualityMatch(Struct, frozen=True, kw_only=True):
    """Comparison of scores with those of another cell, for the group of questions that differs most."""

    task: str
    depth: float | None
    value: float | None
    """Mean log-likelihood of a token in the group's answers, in nats."""
    reference: float | None
    """Mean of the other cell, in nats."""
    difference: float | None
    """Absolute difference of the two; null if one of them is not finite."""
    limit: float
    """Largest difference that passes."""

    @property
    def is_within(self) -> bool:
        """True if the difference is up to the limit."""
        return self.difference is not None and self.difference <= self.limit


class QualitySection(Struct, frozen=True, kw_only=True):
    """Scores of questions, by teacher forcing on the weights before the first step."""

    task: list[str]
    """Task of each question."""
    depth: list[float | None]
    """Place of the asked statement in the context of each question, from 0 to 1; null if it is not known."""
    answer_tokens: list[int]
    """Number of tokens of each answer."""
    sequence_tokens: PositiveInt
    """Tokens of a sequence with padding."""
    digest: str
    """Digest of all questions, equal for equal questions."""
    whole: Scores
    """Scores with the whole context, as far as it fits in the sequence."""
    chunks: Scores | None
    """Scores with retrieved chunks in place of the context; null if they were not asked for."""
    compared_with: str | None = None
    """Cell with the same questions and weights, whose scores were compared; null without one."""
    match: QualityMatch | None = None
    """Comparison with that cell; null without one."""

    @property
    def groups(self) -> list[tuple[str, float | None]]:
        """Task and depth of each group of questions, in order of first appearance."""
        return [*dict.fromkeys(zip(self.task, self.depth, strict=True))]

    @property
    def answer_nats(self) -> float | None:
        """Mean log-likelihood of a token of all answers; None if one of them is not finite."""
        finite = [value for value in self.whole.log_likelihood if value is not None]
        return None if len(finite) < len(self.task) else sum(finite) / sum(self.answer_tokens)

    def mean_log_likelihood(self, group: tuple[str, float | None]) -> float | None:
        """Return the mean log-likelihood of a token in the answers of a group; None if it is not finite."""
        rows = [i for i, other in enumerate(zip(self.task, self.depth, strict=True)) if other == group]
        sums = [self.whole.log_likelihood[row] for row in rows]
        finite = [value for value in sums if value is not None]
        if len(finite) < len(sums):
            return None
        return sum(finite) / sum(self.answer_tokens[row] for row in rows)


class QualityFacts(PassFacts[QualitySection, QualitySection]):
    name = "quality"
    part_type = QualitySection
    needs_all_ranks = True
    is_evidence = True
    workload = "train"
    fault_origin = FaultOrigin.BEFORE_STEPS

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> QualitySection:  # noqa: ARG002
        """Return the section of the first rank, which has the sums over all ranks, with all ranks' times."""
        parts = self.parts(reports)
        whole = replace(parts[0].whole, **join_by_rank([part.whole for part in parts], "question_ms"))
        chunks = [part.chunks for part in parts if part.chunks is not None]
        joined = replace(chunks[0], **join_by_rank(chunks, "question_ms")) if chunks else None
        return replace(parts[0], whole=whole, chunks=joined)

    def gate(self, cell: Cell, section: QualitySection) -> str | None:
        """Return a message about the first answer whose log-likelihood is not finite; None without one."""
        for row, value in enumerate(section.whole.log_likelihood):
            if value is None or not math.isfinite(value):
                return (
                    f"quality: the answer to question {row} ({section.task[row]}) has the log-likelihood"
                    f" {value} at {cell.seq_len} tokens"
                )
        return None

    def checks(self, cell: Cell, section: QualitySection | None) -> list[Check]:
        """Return the comparison of scores; no check in cells without scores or before the others."""
        if not is_scored(cell):
            return []
        check = Check(what=CHECK, against="another cell", tokens=cell.seq_len)
        if section is None:
            return [replace(check, tokens=None, reason=NOT_RUN)]
        if section.match is None:
            return []
        check = replace(check, against=f"cell {section.compared_with}")
        if section.match.limit >= MISTAKE_NATS:
            hidden = (
                f"a lost block may change a token's log-likelihood by only {MISTAKE_NATS:g} nats; rounding"
                f" may change it by {section.match.limit:.2g}"
            )
            check = replace(check, below_noise=hidden)
        return [check]


FACTS = QualityFacts()
