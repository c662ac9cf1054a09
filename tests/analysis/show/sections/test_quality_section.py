"""The report of experiment=quality: accuracy with intervals, agreement, depths, chunks and figures."""

import pytest

from analysis.answers.next_steps import deciding_command
from analysis.cells.position_losses import longest_group
from analysis.cells.quality import Accuracy
from analysis.read.archive import read_archive
from analysis.report import _write
from analysis.show.markdown import markdown_section
from analysis.show.sections.quality_section import quality_section
from analysis.show.terminal import terminal_text
from tests.support.records import CPU, FAILED, make_record, write_sweep
from tests.support.sections import findings_of

TASKS = ("needle", "key_value")
DEPTHS = (0.25, 0.75)
CHUNK_TOKENS = 96


def scores_of(wrong, tokens, question_ms):
    count = len(wrong)
    return {
        "tokens": [tokens] * count, "log_likelihood": [-1.0 - row for row in wrong], "wrong_tokens": wrong,
        "question_ms": [question_ms, 2 * question_ms],
    }  # fmt: skip


def quality_of(seq_len, right, *, base=None, chunks=False, difference=2e-6):
    """Return a section with ten questions a task and depth, of which `right` are right at depth 0.25."""
    groups = [(task, depth) for task in TASKS for depth in DEPTHS]
    wrong = [int(not (depth == DEPTHS[0] and row < right)) for _, depth in groups for row in range(10)]
    match = {
        "task": "needle", "depth": 0.25, "value": -1.0, "reference": -1.0, "difference": difference,
        "limit": 4e-4,
    }  # fmt: skip
    return {
        "task": [task for task, _ in groups for _ in range(10)],
        "depth": [depth for _, depth in groups for _ in range(10)],
        "answer_tokens": [1] * 40, "sequence_tokens": seq_len, "digest": "0",
        "whole": scores_of(wrong, seq_len, seq_len / 100),
        "chunks": scores_of([1 - count for count in wrong], CHUNK_TOKENS, 1.0) if chunks else None,
        "compared_with": base, "match": match if base else None,
    }  # fmt: skip


def record_of(strategy, seq_len, right, *, scaling="none", status="ok", **quality):
    config = {
        **CPU, "strategy": strategy, "seq_len": seq_len, "model": "mine", "experiment": "quality",
        "model.rope_scaling": scaling, "model.rope_factor": None,
    }  # fmt: skip
    failed = FAILED | {"status": status, "reason": "quality: off at depth 25 %"} if status != "ok" else {}
    section = {} if failed else {"quality": quality_of(seq_len, right, **quality)}
    return make_record(config=config, experiment="quality", **section, **failed)


def text_of(tmp_path, *records):
    """Return the answer and the section of these records."""
    findings = findings_of(tmp_path, records)
    return "\n".join([findings.verdict.answer, markdown_section(quality_section(findings))])


def test_table_has_accuracy_speed_and_memory_by_series(tmp_path):
    text = text_of(
        tmp_path,
        record_of("local", 1024, 10),
        record_of("local", 4096, 2),
        record_of("local", 4096, 8, scaling="yarn"),
        record_of("ring", 1024, 10, base="x"),
    )
    assert "| local | 1k | 50 % (30-70) | 50 % (30-70) | -1.50 |" in text
    assert "| local | 4k | 10 % (3-30) | 10 % (3-30) | -1.90 |" in text
    assert "| local, yarn | 4k | 40 % (22-61) |" in text
    assert "differs by at most 2.0e-06 nats" in text
    assert "local: accuracy from 1k to 4k: needle 50 % to 10 %, key_value 50 % to 10 %." in text
    assert "By depth: local\n" in text
    assert "| 1k | needle | 100 % of 10 | 0 % of 10 |" in text
    assert "By depth: ring" not in text  # its scores are those of local
    assert "chunks" not in text


@pytest.mark.parametrize("is_within", [True, False])
def test_disagreement_names_the_first_cell_and_its_reason(tmp_path, is_within):
    """A result that is wrong for another reason says nothing on the scores."""
    wrong = [
        record_of("ring", length, 0, status="wrong_result")
        | {"quality": quality_of(length, 0, base="x", difference=1e-6 if is_within else 0.5)}
        for length in (4096, 2048)
    ]
    text = text_of(tmp_path, record_of("local", 1024, 10), *wrong)
    assert ("do not agree, first at 2048 tokens: ring, quality: off at depth 25 %." in text) != is_within
    assert ("The strategies agree: in 2 cells" in text) == is_within
    assert "nothing says whether the strategies agree" in text_of(tmp_path, record_of("local", 1024, 10))


def test_report_advises_no_repeats_that_the_experiment_refuses(tmp_path):
    records = [record_of(name, 1024, 10) for name in ("local", "ring")]
    findings = findings_of(tmp_path, records)
    assert findings.verdict.to_decide is None
    assert deciding_command(findings.archive) is None


def test_chunks_have_their_own_columns_and_figure(tmp_path):
    findings = findings_of(tmp_path, [record_of("local", 1024, 10, chunks=True)])
    text = markdown_section(quality_section(findings))
    assert "| needle by chunks |" in text
    assert "| 20.5 |" in text  # ms of a question on the slowest rank
    assert "| 2.00 |" in text


def test_cut_contexts_are_printed_next_to_many_tasks(tmp_path):
    record = record_of("local", 1024, 10)
    record["quality"] |= {"task": [f"a_task_of_files_{row % 20}" for row in range(40)], "depth": [None] * 40}
    record["quality"]["whole"]["tokens"][:37] = [1000] * 37
    section = quality_section(findings_of(tmp_path, [record]))
    assert "| 3 of 40 |" in markdown_section(section)
    printed = terminal_text([section], answer_first=True)
    assert "cut contexts" in printed
    more, _, names = printed.partition(" more columns in summary.md: ")
    assert int(more.split()[-1]) == len(names.partition("\n\n")[0].split(", "))
    assert "a_task_of_files_19" in names


def test_report_without_scores_has_no_section(tmp_path):
    assert quality_section(findings_of(tmp_path, [make_record()])) is None


def test_wilson_interval():
    low, high = Accuracy(10, 10).interval
    assert (low, high) == (pytest.approx(0.722, abs=1e-3), 1.0)  # Brown, Cai and DasGupta 2001


def with_positions(record, losses, base=None, difference=1e-5):
    """Return the record with mean losses by position."""
    match = {
        "part": 0, "value": losses[0], "reference": 2.0, "difference": difference, "limit": 4e-4,
    }  # fmt: skip
    record["losses"] |= {
        "by_position": {"loss": losses, "boundary_loss": 2.0, "valid_tokens": [64] * 16 + [96]},
        "compared_with": base,
        "position_match": match if base else None,
    }
    return record


@pytest.mark.parametrize("own_text", [True, False])
def test_figures_of_scores_and_of_losses_by_position(tmp_path, own_text):
    config = {**CPU, **({"data.path": "/texts"} if own_text else {})}
    base = with_positions(make_record(config={**config, "strategy": "local"}), [2.0] * 16)
    ring = with_positions(make_record(config=config), [2.0 + 1e-5] * 16, base["cell_id"])
    records = [
        record_of("local", 1024, 10, chunks=True),
        record_of("local", 2048, 5, chunks=True),
        base,
        ring,
    ]
    write_sweep(tmp_path, records)
    archive = read_archive([tmp_path], {})
    group = longest_group(archive)
    assert (group is not None) == own_text
    if own_text:
        assert group.reference.config["strategy"] == "local"
        assert [record.config["strategy"] for record in group.compared] == ["ulysses"]
    _write(archive, tmp_path / "report")
    names = {path.stem for path in (tmp_path / "report" / "figures").glob("*.png")}
    assert {"quality", "quality_by_depth_local", "quality_chunks"} <= names
    assert ("loss_by_position" in names) == own_text
