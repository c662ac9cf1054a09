"""Scores equal those of transformers' own model on one device, under every strategy and engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import convert, to_builtins

from bench.measure import PASSES
from bench.measure.facts import RankReport
from bench.measure.quality.rank import batch_of, score_questions
from bench.measure.quality.section import QualitySection
from bench.strategies import STRATEGIES
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.chunks import with_retrieved_chunks
from bench.training.models import build_model
from bench.training.questions import Encoder
from bench.training.tasks import questions_of
from tests.support.cells import INSTALLED, make_cell, words_for
from tests.support.many_cells import built_workloads, results_of_cells

TOKENS = 256
MODEL = (
    "model=qwen3_nano", "model.num_layers=2", "model.init_std=0.1", "model.rope_theta=1e4",
    "model.rope_scaling=yarn", "model.trained_len=64",
)  # fmt: skip
COMMON = (f"seq_len={TOKENS}", "quality.questions=5", "batch=2", "engine=ddp")
CHUNKS = ("quality.chunks=2", "quality.chunk_tokens=32")
FILE = Path(__file__).with_name("questions.jsonl")
LIMITS = {"fp32": 1e-4, "bf16": 0.1}
"""Largest difference of an answer's log-likelihood, in nats."""
FACTS = PASSES["quality"]


def cell_of(strategy, ranks, *more):
    """Return the cell in fp32, or in the first dtype of a strategy without it."""
    dtypes = STRATEGIES[strategy].dtypes
    dtype = "fp32" if "fp32" in dtypes else dtypes[0]
    words = [word for word in words_for(strategy) if not word.startswith("model=")]
    return make_cell(
        *MODEL,
        *COMMON,
        *words,
        f"strategy={strategy}",
        f"cluster.world_size={ranks}",
        f"dtype={dtype}",
        *more,
    )


def cells():
    by_name = {f"{name} {ranks}": cell_of(name, ranks) for name in INSTALLED for ranks in (2, 4)}
    by_name["fsdp2"] = cell_of("ring", 4, "engine=fsdp2", "sp_degree=2", "dp_shard=2")
    by_name["zero3"] = cell_of("ulysses", 2, "engine=zero3")
    by_name["groups"] = cell_of("local", 2, "sp_degree=1", "dp_shard=2", *CHUNKS)
    by_name["chunks"] = cell_of("ring", 2, *CHUNKS)
    by_name["file"] = cell_of("ring", 2, f"data.path={FILE}", *CHUNKS)
    return {name: cell for name, cell in by_name.items() if cell.strategy != "local" or name == "groups"}


def score(job, log):
    """Report in a rank the scores of every cell."""
    return {
        "results": {
            name: to_builtins(score_questions(workload.trainer))
            for name, workload in built_workloads(job, log)
        }
    }


@torch.no_grad()
def scores_on_one_device(cell, chunks):
    """Return the log-likelihood of every answer and its wrong tokens, by transformers' model in float32."""
    model = build_model(cell.model, attention_name="sdpa", max_positions=TOKENS, seed=cell.seed).eval()
    encoder = Encoder(None, 256)
    questions = questions_of(cell, encoder)
    if chunks:
        questions = [
            with_retrieved_chunks(question, encoder, chunks=2, chunk_tokens=32) for question in questions
        ]
    encoded = [encoder.encode(question, TOKENS + 1) for question in questions]
    batch = batch_of(encoded, TOKENS)
    logits = model(input_ids=batch.input_ids).logits
    answers = batch.labels != IGNORED_LABEL
    likelihood = logits.log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    wrong = (logits.argmax(-1) != batch.labels) & answers
    return (likelihood * answers).sum(1).tolist(), wrong.sum(1).tolist()


@pytest.fixture(scope="module")
def sections(launcher, tmp_path_factory):
    """Return the merged section of every cell, by name."""
    results = results_of_cells(launcher, tmp_path_factory.mktemp("scores"), cells(), score)
    merged = {}
    for name, cell in cells().items():
        assert isinstance(results[name], list), results[name]
        parts = [RankReport({"quality": convert(part, QualitySection)}, {}) for part in results[name]]
        merged[name] = FACTS.merge(parts, cell)
    return merged


@pytest.mark.parametrize("name", cells())
def test_scores_are_those_of_transformers(sections, name):
    cell, section = cells()[name], sections[name]
    forms = [(section.whole, False)] + ([(section.chunks, True)] if section.chunks else [])
    assert (section.chunks is not None) == bool(cell.quality.chunks)
    for scores, is_chunks in forms:
        expected, wrong = scores_on_one_device(cell, is_chunks)
        assert scores.log_likelihood == pytest.approx(expected, abs=LIMITS[cell.dtype])
        assert np.std(expected) > 0.1
        if cell.dtype == "fp32":
            assert scores.wrong_tokens == wrong
        assert len(scores.question_ms) == cell.cluster.world_size
        assert max(scores.tokens) <= TOKENS
    assert FACTS.gate(cell, section) is None
    assert (section.digest == sections["ring 2"].digest) == (name != "file")


def test_questions_of_a_file_have_its_tasks_and_no_depth(sections):
    section = sections["file"]
    assert section.groups == [("colours", None), ("places", None)]
    assert section.answer_tokens == [len(" blue"), len(" There and back again.")]
    assert section.whole.tokens[1] == TOKENS  # its context lost its middle
