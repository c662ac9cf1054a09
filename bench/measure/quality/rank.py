"""The quality pass on a rank: it scores questions by teacher forcing, before any step changes the weights.

One forward pass of the trained model, under its strategy and engine, gives the log-likelihood of every token
of the answers. No text is generated and no KV cache is needed, so the sequence may be longer than one device
can hold.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.quality.section import QualitySection, Scores, is_scored
from bench.measure.rank_pass import RankPass
from bench.measure.timing.clock import synchronise
from bench.ranks.progress_bars import use_thread_lock
from bench.strategies.strategy import IGNORED_LABEL, Batch
from bench.training.chunks import with_retrieved_chunks
from bench.training.questions import EncodedQuestion, Encoder, Question, read_questions
from bench.training.tasks import questions_of
from bench.training.trainers.trainer import Trainer


class QualityPass(RankPass):
    section: QualitySection | None = None

    def before_steps(self) -> None:
        """Score the questions if the cell belongs to `experiment=quality` and does not train the model."""
        trainer = self.measurement.subject.trainer
        if trainer is None or not is_scored(trainer.cell):
            return
        with self.measurement.log.run_phase("quality"):
            self.section = score_questions(trainer, self.measurement.raise_if_rank_failed)
            read_questions.cache_clear()  # the steps that follow measure memory

    def part(self) -> QualitySection | None:
        return self.section


def score_questions(
    trainer: Trainer, raise_if_rank_failed: Callable[[], None] = lambda: None
) -> QualitySection:
    """Return the scores of all questions of the trainer's cell; every rank must call it."""
    cell = trainer.cell
    encoder = Encoder(cell.data.tokenizer, cell.model.vocab_size)
    questions = questions_of(cell, encoder)
    encoded = [encoder.encode(question, cell.seq_len + 1) for question in questions]
    content = b"".join(question.ids.tobytes() for question in encoded)
    return QualitySection(
        task=[question.task for question in questions],
        depth=[question.depth for question in questions],
        answer_tokens=[int(question.is_answer.sum()) for question in encoded],
        sequence_tokens=cell.padded_len,
        digest=hashlib.sha256(content).hexdigest()[:16],
        whole=_all_scores(trainer, encoded, cell.padded_len, raise_if_rank_failed),
        chunks=_chunk_scores(trainer, questions, encoder, raise_if_rank_failed)
        if cell.quality.chunks
        else None,
    )


def batch_of(questions: Sequence[EncodedQuestion], length: int) -> Batch:
    """Return questions as whole sequences [B, length], in which only tokens of answers are labels."""
    ids = torch.zeros(len(questions), length + 1, dtype=torch.long)
    is_answer = torch.zeros(len(questions), length + 1, dtype=torch.bool)
    for row, question in enumerate(questions):
        ids[row, : len(question.ids)] = torch.from_numpy(question.ids)
        is_answer[row, : len(question.ids)] = torch.from_numpy(question.is_answer)
    labels = ids[:, 1:].masked_fill(~is_answer[:, 1:], IGNORED_LABEL)
    positions = torch.arange(length).expand(len(questions), -1)
    return Batch(torch.arange(len(questions)), ids[:, :-1].contiguous(), labels, positions)


def _chunk_scores(
    trainer: Trainer,
    questions: Sequence[Question],
    encoder: Encoder,
    raise_if_rank_failed: Callable[[], None],
) -> Scores:
    """Return the scores of the questions with retrieved chunks in place of the context."""
    cell = trainer.cell
    use_thread_lock()
    retrieved = [
        with_retrieved_chunks(
            question, encoder, chunks=cell.quality.chunks, chunk_tokens=cell.quality.chunk_tokens
        )
        for question in questions
    ]
    encoded = [encoder.encode(question, cell.seq_len + 1) for question in retrieved]
    multiple = trainer.strategy.facts.length_multiple(cell)
    longest = max(len(question.ids) for question in encoded) - 1
    return _all_scores(trainer, encoded, -(-longest // multiple) * multiple, raise_if_rank_failed)


@torch.no_grad()
def _all_scores(
    trainer: Trainer,
    questions: Sequence[EncodedQuestion],
    length: int,
    raise_if_rank_failed: Callable[[], None],
) -> Scores:
    """Return the scores of questions in sequences of `length` tokens; every rank must call it.

    The questions are divided among data-parallel groups, which run the same number of forward passes.
    """
    cell, device, groups = trainer.cell, trainer.data.device, trainer.strategy.groups
    sums = torch.zeros(len(questions), 2, dtype=torch.float64, device=device)
    times_ms = []
    for start in range(0, len(questions), cell.batch * cell.dp_degree):
        first = start + groups.data_rank * cell.batch
        rows = [row for row in range(first, first + cell.batch) if row < len(questions)]
        # Every batch is full, because DeepSpeed's attention takes one batch size and engines need all ranks.
        filled = [*rows, *[len(questions) - 1] * (cell.batch - len(rows))]
        batch = batch_of([questions[row] for row in filled], length)
        synchronise(device)
        begin = time.perf_counter()
        scores_B2 = _batch_scores(trainer, batch)
        synchronise(device)
        times_ms.append((time.perf_counter() - begin) * 1e3 / len(batch.input_ids))
        if rows:
            sums[rows] = scores_B2[: len(rows)].double()
    trainer.input_digest.take()
    trainer.phase.enter(None)
    raise_if_rank_failed()
    dist.all_reduce(sums)
    log_likelihoods, wrong = sums.T.tolist()
    return Scores(
        tokens=[len(question.ids) - 1 for question in questions],
        log_likelihood=log_likelihoods,
        wrong_tokens=[int(count) for count in wrong],
        question_ms=[statistics.median(times_ms)],
    )


def _batch_scores(trainer: Trainer, whole: Batch) -> Tensor:
    """Return the sums over this rank's shard of log-likelihoods and of wrong tokens, [B, 2]."""
    batch = trainer.strategy.shard(whole) if trainer.wiring.shards_batch else whole
    batch = batch.to_device(trainer.data.device)
    trainer.phase.enter("forward")
    with trainer.engine.micro_step(last=False), trainer.strategy.step(batch):
        scores: Tensor = trainer.engine.module(
            batch.input_ids, batch.labels, batch.position_ids, scores_labels=True
        )
    return scores.sum(1)


PASS = QualityPass
