"""The packages are judged by what their cells become, and what is not expected is said."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.cell.launcher import Launcher
from bench.environment import this_machine
from bench.judge_packages.__main__ import answer, main
from bench.judge_packages.page import Answer, page, unexpected
from bench.judge_packages.questions import BASE, CHOICES, subjects
from bench.judge_packages.verdict import Verdict, verdict_of
from bench.passes.engagement.section import wrong_exchange
from bench.record import Failure, Status
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from bench.strategies.facts import NOT_ASKED, NOT_OFFERED
from tests.cells import TWO_CORES

PACKAGES = {name for name, facts in STRATEGIES.items() if facts.package is not None}
LOG = 'File "/x/site-packages/torch/a.py"\nFile "/x/site-packages/yunchang/b.py", line 3\n{}: no\nway'
UNSEEN = "wrong, and WITHOUT_US in bench.judge_packages.page does not say how to see that without us"
RUNS, WRONG = Answer(Verdict("runs"), None), Answer(Verdict("wrong", "dq | is off"), None)


def record(status, *, reason=None, kind=None):
    failure = kind and Failure(
        rank=0, phase="parity", kind=kind, message="no\nway", log_tail=LOG.format(kind)
    )
    return SimpleNamespace(status=status, reason=reason, failure=failure, sections={})


def raised():
    """By a line of the package's own."""
    found = record(Status.ERROR, kind="RuntimeError")
    log = 'File "/x/site-packages/yunchang/b.py", line 3, in f\n    raise RuntimeError("no way")\n'
    found.failure = replace(found.failure, log_tail=log)
    return found


@pytest.mark.parametrize(
    ("found", "word", "why"),
    [
        (record(Status.OK), "runs", ""),
        (record(Status.WRONG_RESULT, reason="dq is off", kind="WrongResultError"), "wrong", "dq is off"),
        (record(Status.UNSUPPORTED, reason="broken"), "refuses", "broken"),
        (record(Status.ERROR, kind="ValueError"), "refuses", "yunchang: ValueError: no way"),
        (record(Status.ERROR, kind="RuntimeError"), "fails", "yunchang: RuntimeError: no way"),
        (raised(), "refuses", "yunchang: RuntimeError: no way"),
        (record(Status.TIMED_OUT), "fails", "timed_out"),
    ],
)
def test_a_verdict_says_what_became_of_a_cell_and_whose_words_these_are(found, word, why):
    assert verdict_of(found, None) == Verdict(word, why)


@pytest.mark.parametrize(("error", "word"), [(0.1, "unexplained"), (0.3, "wrong")])
def test_other_bytes_than_our_formula_are_called_wrong_only_beside_a_wrong_number(error, word):
    (subject,) = subjects(("deepspeed_ulysses",))
    cell = subject.cell(BASE, TWO_CORES)
    given = [cell.shard_len, cell.model.num_heads, cell.model.num_kv_heads]
    engagement = SimpleNamespace(attention_shapes=[[given]] * 2, sent_bytes={"attention": [1, 1]})
    length = SimpleNamespace(errors={"out": error}, limits={"out": 0.2}, tokens=256)
    found = record(Status.WRONG_RESULT, reason=wrong_exchange(cell, engagement))
    found.sections = {"engagement": engagement, "full_length": length}
    assert verdict_of(found, cell).word == word
    assert "or our formula is not that of deepspeed" in found.reason


UNTOLD = {
    ("deepspeed_fpdt", "documents"): NOT_ASKED,
    ("deepspeed_fpdt", "full mask"): NOT_ASKED,
    ("ring_flash_attn", "documents"): NOT_OFFERED,
    ("ring_flash_attn_llama3", "fp32"): NOT_ASKED,
    ("torch_cp", "documents"): NOT_OFFERED,
    ("yunchang_ring", "documents"): NOT_OFFERED,
    ("yunchang_usp", "documents"): NOT_ASKED,
    ("yunchang_usp", "fp32"): NOT_ASKED,
}


@pytest.mark.parametrize(("name", "choice"), UNTOLD)
def test_nothing_runs_without_the_package_or_what_it_is_not_told(name, choice, monkeypatch):
    subject = next(subjects((name,)))
    monkeypatch.setattr("bench.judge_packages.__main__.installed", lambda package: None)
    assert answer(subject, choice, None, TWO_CORES).verdict.word == "absent"
    monkeypatch.setattr("bench.judge_packages.__main__.installed", lambda package: "1.0")
    found = answer(subject, choice, None, TWO_CORES)
    assert found.verdict.word == UNTOLD[name, choice]
    assert found.verdict.why
    assert not found.is_unexpected


def test_every_strategy_of_a_package_is_asked_in_every_layout():
    asked = [*subjects()]
    assert {subject.facts.name for subject in asked} == PACKAGES
    rings = {subject.words for subject in asked if subject.facts.name == "yunchang_ring"}
    assert rings == {("layout=zigzag",), ("layout=contiguous",), ("layout=striped",)}


def test_the_page_has_a_row_a_subject_each_word_once_and_how_to_see_what_is_wrong_without_us():
    (subject,) = subjects(("deepspeed_ulysses",))
    refused = replace(RUNS, refusal="not here")
    found = dict.fromkeys(CHOICES, RUNS) | {"fp16": WRONG, "fp32": WRONG, "documents": refused}
    rings = [
        (ring, {**dict.fromkeys(CHOICES, RUNS), "fp16": WRONG}) for ring in subjects(("ring_flash_attn",))
    ]
    text = page([(subject, found), *rings], "the command", "this machine")
    (row,) = (line for line in text.splitlines() if "| `deepspeed_ulysses` |" in line)
    assert [cell.strip() for cell in row.split("|")][4:11] == [
        "runs", "wrong 1", "wrong 1", "runs", "runs", "runs", "runs †2",
    ]  # fmt: skip
    assert "\n1. dq \\| is off\n2. not here\n" in text
    assert text.count("- `ring_flash_attn`, fp16: on two GPUs call") == 1


def test_what_does_not_run_though_nothing_refuses_it_is_named():
    (subject,) = subjects(("deepspeed_ulysses",))
    (ring, *_) = subjects(("ring_flash_attn",))
    refused = replace(WRONG, refusal="not here")
    found = {BASE: RUNS, "fp16": WRONG, "fp32": refused}
    assert {*unexpected([(subject, found), (ring, {"fp16": refused})])} == {
        "deepspeed_ulysses, fp16: wrong, not refused here: dq | is off",
        *(f"deepspeed_ulysses, {choice}: {UNSEEN}" for choice in ("fp16", "fp32")),
    }


def test_strategies_without_a_package_are_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--strategies", "ring,nobodys"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_an_answer_is_that_of_real_ranks_whatever_we_would_refuse():
    """Its contiguous ring rounds dq of fp16 to bf16: refused here, run all the same to be judged."""
    subject = next(each for each in subjects(("ring_flash_attn",)) if each.words == ("layout=contiguous",))
    found = answer(subject, "fp16", Launcher(), this_machine())
    assert found.verdict.word == "wrong"
    assert "dq is fp16 but holds numbers of bf16 only" in found.verdict.why
    assert found.refusal == refusal(subject.cell("fp16", this_machine()))
    assert not found.is_unexpected
