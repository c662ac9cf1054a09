"""Section of `experiment=quality`: scores of answers by length and depth, next to speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analysis.cells.quality import Accuracy, ScoredCell, by_series, question_ms, tasks_of
from analysis.labels import bytes_label, number_label, status_label
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.common.labels import length_label

READING = (
    "Accuracy: share of questions whose whole answer is the most likely one, token by token, given the right"
    " tokens before it; in brackets Wilson's 95 % interval. nats: mean log-likelihood of a token of all"
    " answers. ms: one forward pass for a question. tokens/s and peak: training steps at this length."
)
CHUNK_READING = "by chunks: the same questions with retrieved chunks in place of the context."
DEPTH_READING = "Accuracy by the place of the asked statement in the context, from its beginning to its end."


@dataclass(frozen=True, slots=True)
class DepthRow:
    """One task of a cell, by depth."""

    cell: ScoredCell
    task: str


def quality_section(findings: Findings) -> Section | None:
    """Return the tables of scores; None if no cell scores a model."""
    cells = findings.scored_cells
    if not cells:
        return None
    tasks = tasks_of(cells)
    has_chunks = any(cell.quality and cell.quality.chunks for cell in cells)
    lines = [*_fall_lines(cells, tasks)]
    dispensable = ["status", "ms", "ms by chunks", *(f"{task} by chunks" for task in tasks), "nats"]
    dispensable += tasks[:0:-1]
    table = Table.from_items(_columns(tasks, has_chunks=has_chunks), cells, dispensable)
    reading = f"{READING} {CHUNK_READING}" if has_chunks else READING
    return Section(
        "Answers to questions",
        lines,
        table,
        reading,
        parts=[*_depth_sections(cells, tasks)],
        prints_lines=True,
        prints_table=True,
        answers=True,
    )


def _columns(tasks: Sequence[str], *, has_chunks: bool) -> list[Column]:
    def accuracy_column(task: str, *, chunks: bool) -> Column:
        heading = f"{task} by chunks" if chunks else task
        return Column(heading, lambda cell: _accuracy_text(cell.accuracy(task, chunks=chunks)))

    return [
        Column("series", lambda cell: str(cell.series), is_words=True),
        Column("length", lambda cell: length_label(cell.seq_len)),
        *(accuracy_column(task, chunks=False) for task in tasks),
        Column("cut contexts", _cut_text),
        Column("nats", _nats_text),
        Column("tokens/s", _rate_text),
        Column("peak", lambda cell: "" if cell.peak_bytes is None else bytes_label(cell.peak_bytes)),
        Column("ms", lambda cell: number_label(question_ms(cell.quality.whole)) if cell.quality else ""),
        *(accuracy_column(task, chunks=True) for task in tasks if has_chunks),
        Column("ms by chunks", _chunk_ms_text),
        Column("status", lambda cell: status_label(cell.record.status), is_words=True),
    ]


def _accuracy_text(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return ""
    low, high = accuracy.interval
    return f"{accuracy.share * 100:.0f} % ({low * 100:.0f}-{high * 100:.0f})"


def _cut_text(cell: ScoredCell) -> str:
    """Return the number of questions of a file that fill the sequence, whose contexts lost their middle."""
    quality = cell.quality
    questions = [] if quality is None else [*zip(quality.whole.tokens, quality.depth, strict=True)]
    cut = questions.count((cell.seq_len, None))
    return f"{cut} of {len(questions)}" if cut else ""


def _nats_text(cell: ScoredCell) -> str:
    nats = cell.quality.answer_nats if cell.quality else None
    return "" if nats is None else f"{nats:.2f}"


def _chunk_ms_text(cell: ScoredCell) -> str:
    chunks = cell.quality.chunks if cell.quality else None
    return "" if chunks is None else number_label(question_ms(chunks))


def _rate_text(cell: ScoredCell) -> str:
    rate = cell.results.rate(cell.results.median_ms)
    return "" if rate is None else number_label(rate)


def _fall_lines(cells: Sequence[ScoredCell], tasks: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the accuracy of each task at the shortest and the longest length of a series.

    Series that were compared with another one have its scores, and no sentence.
    """
    for name, series in by_series([cell for cell in cells if cell.is_base]).items():
        ends = [series[0], series[-1]]
        if len(series) < 2:  # noqa: PLR2004  lengths
            continue
        parts = []
        for task in tasks:
            first, last = (cell.accuracy(task) for cell in ends)
            if first is not None and last is not None:
                parts.append(f"{task} {first.share * 100:.0f} % to {last.share * 100:.0f} %")
        first_length, last_length = (length_label(cell.seq_len) for cell in ends)
        yield f"{name}: accuracy from {first_length} to {last_length}: {', '.join(parts)}."


def _depth_sections(cells: Sequence[ScoredCell], tasks: Sequence[str]) -> Iterator[Section]:
    """Yield the table by depth of every series whose scores were compared with no other cell's."""
    for name, series in by_series([cell for cell in cells if cell.is_base]).items():
        depths = sorted(
            {depth for cell in series if cell.quality for depth in cell.quality.depth if depth is not None}
        )
        if not depths:
            continue
        rows = [DepthRow(cell, task) for cell in series for task in tasks]
        columns = [
            Column("length", lambda row: length_label(row.cell.seq_len)),
            Column("task", lambda row: str(row.task), is_words=True),
            *(_depth_column(depth) for depth in depths),
        ]
        yield Section(f"By depth: {name}", (), Table.from_items(columns, rows), DEPTH_READING)


def _depth_column(depth: float) -> Column:
    def text(row: DepthRow) -> str:
        accuracy = row.cell.accuracy(row.task, depth)
        return "" if accuracy is None else f"{accuracy.share * 100:.0f} % of {accuracy.questions}"

    return Column(f"{depth * 100:.0f} %", text)
