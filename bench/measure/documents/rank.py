"""The documents pass on a rank: it counts documents from their ends and runs no step."""

from __future__ import annotations

from bench.attention.documents import Documents
from bench.cost.flops import packed_area
from bench.measure.documents.section import DocumentsSection
from bench.measure.rank_pass import RankPass
from bench.training.data import StepData
from bench.training.trainers.trainer import Trainer


class DocumentsPass(RankPass):
    def part(self) -> DocumentsSection | None:
        measurement = self.measurement
        trainer = measurement.subject.trainer
        if trainer is None or not trainer.cell.data.packs:
            return None
        with measurement.log.run_phase("documents"):
            return count_documents(trainer, measurement.timed.numbers)


def count_documents(trainer: Trainer, steps: range) -> DocumentsSection:
    """Return the number of documents and this rank's attention area in each of these steps."""
    cell, data = trainer.cell, trainer.data
    unpadded = [_documents_of_step(data, step, cell.seq_len) for step in steps]
    padded = [_documents_of_step(data, step, cell.padded_len) for step in steps]
    return DocumentsSection(
        documents=[documents.count for documents in unpadded],
        pairs=[_causal_pairs(documents) for documents in unpadded],
        computed_pairs=[_causal_pairs(documents) for documents in padded],
        area=[[_local_area(trainer, step) for step in steps]],
    )


def _documents_of_step(data: StepData, step: int, seq_len: int) -> Documents:
    per_step = data.cell.sequences_per_step
    documents = data.documents(range(step * per_step, (step + 1) * per_step), seq_len)
    assert documents is not None
    return documents


def _causal_pairs(documents: Documents) -> int:
    return documents.causal_pairs([slice(0, documents.tokens)])


def _local_area(trainer: Trainer, step: int) -> int:
    """Return the number of (query, key, head) triples of one layer that this rank computes in a step."""
    cell, groups = trainer.cell, trainer.strategy.groups
    micro_steps = (
        trainer.data.documents(trainer.data.samples(step, micro_step, groups.data_rank), cell.padded_len)
        for micro_step in range(cell.grad_accum)
    )
    return sum(
        packed_area(cell, documents, groups.sequence_rank)
        for documents in micro_steps
        if documents is not None
    )


PASS = DocumentsPass
