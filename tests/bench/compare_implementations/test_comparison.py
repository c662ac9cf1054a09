"""The comparison runs every implementation, says what each sends and holds, and which is faster."""

import json
import os
import signal
import subprocess
import sys

import pytest

from bench.compare_implementations import processes
from bench.compare_implementations.__main__ import main
from bench.compare_implementations.comparison import Row, rows_of
from bench.compare_implementations.entrants import Setting, entrants, settings
from bench.config import ConfigError
from bench.environment import this_machine
from bench.strategies import STRATEGIES
from bench.strategies.ulysses.attention import UlyssesAttention

NANO = Setting(2, 256, 4, 2)


def compare(*words):
    command = [sys.executable, "-m", "bench.compare_implementations", "--lease=none", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_implementation_is_timed_and_sends_the_bytes_of_its_formula(tmp_path, ranks):
    words = ("--lengths=512", f"--ranks={ranks}", "--processes=1", "--budget-s=0.1", f"--output={tmp_path}")
    done = compare(*words)
    assert done.returncode == 0, done.stderr
    rows = {
        row["implementation"]: row
        for row in json.loads((tmp_path / "implementations.json").read_text())["rows"]
    }
    playing, refused = entrants(Setting(ranks, 512, 4, 2), (), this_machine())
    assert [*rows] == [each.label for each in (*playing, *refused)]
    for each in playing:
        row = rows[each.label]
        assert (row["reason"], len(row["call_ms"]), row["rounds"][0] >= 2) == (None, 1, True)
        assert row["sent_bytes"] == STRATEGIES[each.cell.strategy].exchange_bytes(each.cell), each.label
        assert row["error_ulps"]["out"] < 2
        assert (len(row["ratios"]) == 1) is (each.counterpart is not None)
    assert rows["ring_self_attention"]["peak_bytes"] > 2 * rows["ring"]["peak_bytes"]
    for name in rows:
        assert f"| `{name}`" in (tmp_path / "implementations.md").read_text()
    again = compare(*words)
    assert (again.returncode, len(again.stderr.strip().splitlines())) == (2, 1)
    drawn = subprocess.run([sys.executable, "-m", "analysis.implementations", tmp_path], check=False)
    assert drawn.returncode == 0
    assert (tmp_path / f"implementations_{ranks}_ranks_4_2_heads.svg").read_text().count("<g id=") > len(rows)


def test_a_request_that_cannot_run_is_one_line_and_exit_code_2():
    done = compare("--ranks", "2", "--lengths", "255")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)


@pytest.mark.parametrize("word", ["--heads=4", "--heads=3/2", "--ranks=1", "--budget-s=-1"])
def test_any_bad_word_is_one_line_and_exit_code_2(capsys, word):
    with pytest.raises(SystemExit) as ended:
        main(["--lease=none", "--ranks=2", word])
    assert (ended.value.code, len(capsys.readouterr().err.splitlines())) == (2, 1)


def test_every_strategy_takes_part_or_is_refused_and_packages_are_beside_ours():
    playing, refused = entrants(NANO, (), this_machine())
    named = {each.label.split()[0] for each in (*playing, *refused)}
    assert named == {facts.name for facts in STRATEGIES.usable() if facts.shares_sequences}
    by_label = {each.label: each for each in playing}
    for each in playing:
        if each.counterpart is not None:
            ours = by_label[each.counterpart].cell
            assert STRATEGIES[ours.strategy].package is None
            assert (ours.layout, ours.dtype) == (each.cell.layout, each.cell.dtype)
            assert each.is_ours or ours.kernel == each.cell.kernel


def test_what_a_package_cannot_do_is_refused_with_its_reason_and_ours_runs():
    playing, refused = entrants(NANO, ("dtype=fp32",), this_machine())
    reasons = {each.label: each.reason for each in refused}
    assert "dtype=fp32 is not for ring_flash_attn" in reasons["ring_flash_attn"]
    assert {"ring", "ulysses"} <= {each.label for each in playing}


def test_where_none_of_ours_runs_there_is_nothing_to_compare():
    with pytest.raises(ConfigError, match="none of ours runs"):
        entrants(Setting(2, 255, 4, 2), (), this_machine())


def test_settings_are_all_combinations():
    assert [each.label for each in settings("2,4", "1k", "4/2,16/16")] == [
        "2 ranks, 1k tokens, 4 query and 2 KV heads",
        "2 ranks, 1k tokens, 16 query and 16 KV heads",
        "4 ranks, 1k tokens, 4 query and 2 KV heads",
        "4 ranks, 1k tokens, 16 query and 16 KV heads",
    ]


@pytest.mark.parametrize(
    ("ratio", "words", "slower"),
    [(1.2, "ours is faster", False), (1.0, "no clear difference", False), (0.8, "slower by 25.0%", True)],
)
def test_the_verdict_follows_the_interval(ratio, words, slower):
    whose = {"implementation": "torch_cp", "package": "torch", "counterpart": "ring", "reason": None}
    ratios = tuple([ratio - 0.01, ratio, ratio + 0.01] * 3)
    row = Row(ranks=2, seq_len=1024, num_heads=4, num_kv_heads=2, dtype="bf16", ratios=ratios, **whose)
    assert words in row.verdict
    assert row.is_ours_slower == slower


def test_what_fails_in_a_later_set_has_its_reason_and_no_time():
    ring = [each for each in entrants(NANO, (), this_machine())[0] if each.label == "ring"]
    found = {"failure": None, "errors": {"out": 1.0}, "sent_bytes": 1, "peak_bytes": 1}
    sets = [
        [{"looked": [found], "times_ms": [[1.0, 2.0]]}],
        [{"looked": [found | {"failure": "RuntimeError: gone"}], "times_ms": [[]]}],
    ]
    (row,) = rows_of(NANO, ring, sets, {})
    assert (row.reason, row.call_ms, row.sent_bytes) == ("RuntimeError: gone", (), None)


take_turns = processes.take_turns


def take_turns_until_ulysses(job, log):
    """The second rank does not outlive a call of `ulysses`."""

    def die(self, *qkv, causal=True):
        os.kill(os.getpid(), signal.SIGKILL if job.rank == 1 else signal.SIGSTOP)

    UlyssesAttention.attention = die
    return take_turns(job, log)


def test_who_ends_a_set_of_processes_is_left_out_with_its_reason(launcher, monkeypatch, short_grace):
    monkeypatch.setattr(processes, "take_turns", take_turns_until_ulysses)
    chosen = {"ring", "ulysses", "gather_kv"}
    playing = [each for each in entrants(NANO, (), this_machine())[0] if each.label in chosen]
    turns = processes.played(launcher, playing, budget_s=0.1, processes=1)
    assert {each.label for each in turns.playing} == chosen - {"ulysses"}
    assert [(each.label, "exit code -9" in each.reason) for each in turns.refused] == [("ulysses", True)]
    assert all(times for (reports,) in [turns.sets] for report in reports for times in report["times_ms"])
