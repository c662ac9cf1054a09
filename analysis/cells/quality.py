"""Scores of answers to questions (`experiment=quality`) by series, length, task and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from analysis.read.archive import Archive
from analysis.read.results import Results
from bench.measure.quality.section import EXPERIMENT, TRAINING_DATA, QualitySection, Scores
from bench.record.record import Record, Role, Status

PLAIN = "none"
"""Value of `model.rope_scaling` for plain RoPE."""
SERIES_KEYS: Mapping[str, str] = {
    "strategy": "{}",
    "sp_degree": "sp {}",
    "model": "{}",
    "dtype": "{}",
    "engine": "{}",
    "seed": "seed {}",
    "model.rope_scaling": "{}",
    "model.rope_factor": "x{:g}",
}
"""Settings that distinguish series, with their text."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of right answers: every token of the answer is the most likely one."""

    right: int
    questions: int

    @property
    def share(self) -> float:
        return self.right / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share."""
        from scipy.stats import binomtest  # takes a second

        ends = binomtest(self.right, self.questions).proportion_ci(method="wilson")
        return float(ends.low), float(ends.high)


@dataclass(frozen=True)
class ScoredCell:
    """Cell of `experiment=quality` that scores a model."""

    record: Record
    series: str
    """Strategy, with the model and the RoPE scaling where they vary."""

    @property
    def quality(self) -> QualitySection | None:
        """Scores; None for a cell without a result."""
        return self.record.quality if self.record.status is Status.OK else None

    @property
    def seq_len(self) -> int:
        return int(self.record.config["seq_len"])

    @property
    def strategy(self) -> str:
        return str(self.record.config["strategy"])

    @property
    def is_base(self) -> bool:
        """Whether no other cell's scores were there to compare with."""
        return self.quality is not None and self.quality.match is None

    @cached_property
    def results(self) -> Results:
        """Speed and memory of the cell's training steps."""
        return Results(self.record, {})

    @property
    def peak_bytes(self) -> int | None:
        """Peak allocated memory of the worst rank in training steps."""
        memory = self.record.memory
        peaks = None if memory is None else memory.peak_allocated_bytes
        return None if peaks is None else max(peaks)

    def scores(self, *, chunks: bool) -> Scores | None:
        """Return the scores with the whole context, or with retrieved chunks; None without them."""
        if self.quality is None:
            return None
        return self.quality.chunks if chunks else self.quality.whole

    def accuracy(self, task: str, depth: float | None = None, *, chunks: bool = False) -> Accuracy | None:
        """Return the accuracy of a task, at one depth or at all; None without such questions."""
        quality, scores = self.quality, self.scores(chunks=chunks)
        if quality is None or scores is None:
            return None
        rows = [
            row
            for row, name in enumerate(quality.task)
            if name == task and (depth is None or quality.depth[row] == depth)
        ]
        return Accuracy(sum(scores.wrong_tokens[row] == 0 for row in rows), len(rows)) if rows else None


def question_ms(scores: Scores) -> float:
    """Return the milliseconds of a question on the slowest rank."""
    return max(scores.question_ms)


def scored_cells(archive: Archive) -> list[ScoredCell]:
    """Return the cells that score a model, by series and length; `local` comes first."""
    frame = archive.frame
    index = frame.index[frame["experiment"].eq(EXPERIMENT) & frame["role"].ne(Role.TRAINING)]
    records = [archive.record(row) for row in index]
    records = [record for record in records if record.config.get("data") != TRAINING_DATA]
    names = _series_names(records)
    cells = [ScoredCell(record, name) for record, name in zip(records, names, strict=True)]
    return sorted(cells, key=lambda cell: (cell.strategy != "local", cell.series, cell.seq_len))


def by_series(cells: Sequence[ScoredCell]) -> dict[str, list[ScoredCell]]:
    """Return the cells of each series in order of length."""
    series: dict[str, list[ScoredCell]] = {}
    for cell in cells:
        series.setdefault(cell.series, []).append(cell)
    return series


def tasks_of(cells: Sequence[ScoredCell]) -> list[str]:
    """Return the names of all tasks, in order of first appearance."""
    return [*dict.fromkeys(task for cell in cells if cell.quality for task in cell.quality.task)]


def _series_names(records: Sequence[Record]) -> list[str]:
    """Return the series of each record: its strategy, and other settings as far as they vary."""
    configs = [record.config for record in records]
    varying = {key for key in SERIES_KEYS if len({config.get(key) for config in configs}) > 1}
    if len({config.get("sp_degree") for config in configs} - {1}) < 2:  # noqa: PLR2004  local has one rank
        varying.discard("sp_degree")
    return [
        ", ".join(
            text.format(config.get(key))
            for key, text in SERIES_KEYS.items()
            if key == "strategy" or (key in varying and config.get(key) not in (None, PLAIN))
        )
        for config in configs
    ]
