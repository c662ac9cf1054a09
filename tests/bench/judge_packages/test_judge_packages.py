"""The packages are judged by what their cells become, and what is not expected is said."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.config import ConfigError
from bench.judge_packages.__main__ import Judge, _asked, main
from bench.judge_packages.page import Answer, page, unexpected
from bench.judge_packages.questions import BASE, CHOICES, subjects
from bench.judge_packages.verdict import Verdict, verdict_of
from bench.record import Failure, Status
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from tests.cells import TWO_CORES

PACKAGES = {name for name, facts in STRATEGIES.items() if facts.package is not None}
LOG = 'File "/x/site-packages/torch/a.py"\nFile "/x/site-packages/yunchang/b.py", line 3\n{}: no\nway'
RUNS, WRONG = Answer(Verdict("runs"), None), Answer(Verdict("wrong", "dq | is off"), None)


def record(status, *, reason=None, kind=None):
    failure = kind and Failure(
        rank=0, phase="parity", kind=kind, message="no\nway", log_tail=LOG.format(kind)
    )
    return SimpleNamespace(status=status, reason=reason, failure=failure)


@pytest.mark.parametrize(
    ("found", "word", "why"),
    [
        (record(Status.OK), "runs", ""),
        (record(Status.WRONG_RESULT, reason="dq is off", kind="WrongResultError"), "wrong", "dq is off"),
        (record(Status.UNSUPPORTED, reason="broken"), "refuses", "broken"),
        (record(Status.ERROR, kind="ValueError"), "refuses", "yunchang: ValueError: no way"),
        (record(Status.ERROR, kind="RuntimeError"), "fails", "yunchang: RuntimeError: no way"),
        (record(Status.TIMED_OUT), "fails", "timed_out"),
    ],
)
def test_a_verdict_says_what_became_of_a_cell_and_whose_words_these_are(found, word, why):
    assert verdict_of(found) == Verdict(word, why)


def test_every_strategy_of_a_package_is_asked_in_every_layout():
    asked = [*subjects()]
    assert {subject.facts.name for subject in asked} == PACKAGES
    rings = {subject.words for subject in asked if subject.facts.name == "yunchang_ring"}
    assert rings == {("layout=zigzag",), ("layout=contiguous",), ("layout=striped",)}


@pytest.mark.parametrize("choice", CHOICES)
def test_each_question_changes_one_thing_of_the_base(choice):
    (subject,) = subjects(("deepspeed_ulysses",))
    asked, base = (subject.cell(CHOICES[each], TWO_CORES).flat() for each in (choice, BASE))
    changed = {key for key in asked if asked[key] != base.get(key)}
    of_a_step = {"workload", "engine", "trainer", "optimizer", "loss"}
    assert len({key for key in changed if key.partition(".")[0] not in of_a_step} | {"mask"} & changed) <= 1


def test_the_page_has_a_row_a_subject_and_each_word_of_a_package_once():
    (subject,) = subjects(("deepspeed_ulysses",))
    refused = replace(RUNS, refusal="not here")
    found = dict.fromkeys(CHOICES, RUNS) | {"fp16": WRONG, "fp32": WRONG, "documents": refused}
    text = page([(subject, found)], "the command", "this machine")
    (row,) = (line for line in text.splitlines() if "`deepspeed_ulysses`" in line)
    assert [cell.strip() for cell in row.split("|")][4:11] == [
        "runs", "wrong 1", "wrong 1", "runs", "runs", "runs", "runs †2",
    ]  # fmt: skip
    assert text.endswith("1. dq \\| is off\n2. not here\n")


def test_what_does_not_run_though_nothing_refuses_it_is_named():
    (subject,) = subjects(("deepspeed_ulysses",))
    found = {BASE: RUNS, "fp16": WRONG, "fp32": replace(WRONG, refusal="not here")}
    assert [*unexpected([(subject, found)])] == [
        "deepspeed_ulysses, fp16: wrong, not refused here: dq | is off"
    ]


def test_without_its_package_nothing_of_a_strategy_runs(monkeypatch):
    monkeypatch.setattr("bench.judge_packages.__main__.installed", lambda package: None)
    (subject,) = subjects(("deepspeed_ulysses",))
    judge = Judge()
    monkeypatch.setattr(judge, "launcher", None)
    assert judge.answer(subject, BASE).verdict.word == "absent"


def test_strategies_without_a_package_are_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--strategies", "ring,nobodys"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(ConfigError):
        _asked("ring")


@pytest.mark.slow
@pytest.mark.ranks
def test_an_answer_is_that_of_real_ranks_whatever_we_would_refuse():
    """It takes 16-bit inputs only, as flash-attn: refused here in float32, run all the same to be judged."""
    subject = next(each for each in subjects(("ring_flash_attn",)) if each.words == ("layout=contiguous",))
    judge = Judge()
    answer = judge.answer(subject, "fp32")
    assert answer.verdict.word == "wrong"
    assert "dq" in answer.verdict.why
    assert answer.refusal == refusal(judge.cell(subject, "fp32"))
    assert not answer.is_unexpected
