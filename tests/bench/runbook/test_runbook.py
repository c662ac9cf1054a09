"""Runbooks name commands that exist, run in order, and stop where one fails."""

import pytest

from bench.environment import REPOSITORY
from bench.runbook.__main__ import main
from bench.runbook.dry_run import resolved
from bench.runbook.runbook import read_runbook

BOOKS = sorted((REPOSITORY / "results" / "reference").glob("*.yaml"))
CLAIM = "hf-ulysses-revB-tput-sp4-64k"


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_every_command_of_a_runbook_resolves_for_its_machine(path, tmp_path):
    """`.ci/run` resolves them too."""
    book = read_runbook(path)
    assert [step.name for step, _ in resolved(book, tmp_path)] == [step.name for step in book.steps]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_the_index_says_how_long_a_runbook_takes(path):
    rows = (path.parent / "README.md").read_text().splitlines()
    (row,) = [line for line in rows if f"({path.name})" in line]
    assert row.endswith(f"| {read_runbook(path).minutes:g} |")


def test_there_is_one_for_each_machine_and_the_published_speed_is_decided():
    assert [path.stem for path in BOOKS] == ["eight_h100", "four_h100", "one_gpu"]
    decided = {claim for path in BOOKS for step in read_runbook(path).steps for claim in step.decides}
    assert CLAIM in decided


def book(folder, *steps, gpus=0):
    """A runbook's file of these steps: name, command and what is added."""
    target = f"{{gpu: NVIDIA H100 80GB HBM3, gpus: {gpus}, cores: 8, memory_gib: 64}}"
    lines = ["purpose: a test", f"target: {target}", "steps:"]
    for name, command, *more in steps:
        fields = [f"name: {name}", "minutes: 0.1", f"command: '{command}'", "expects: a", "failure_means: b"]
        lines.append(f"  - {{{', '.join([*fields, *more])}}}")
    path = folder / "book.yaml"
    path.write_text("\n".join(lines))
    return path


WRONG = {
    "a key of a sweep": (("python run_sweep.py seq_lne=8k",), "seq_lne"),
    "a value of a sweep": (("python run_sweep.py seq_len=8q",), "seq_len=8q"),
    "what cannot run there": (("python run_sweep.py strategy=ulysses sp_degree=3",), "sp_degree=3"),
    "a module": (("python -m bench.no_such_module",), "no_such_module"),
    "an option": (("python -m bench.overhead --shrt",), "--shrt"),
    "a test": (("pytest tests/bench/runbook/no_such_test.py",), "no_such_test"),
    "a program": (("bash x",), "bash is neither python nor pytest"),
    "a column": (("python run_sweep.py seq_len=8k sweep_dir=x", "rows: [speed > 1]"), "speed"),
    "a field": (("python run_sweep.py", "hopes: c"), "hopes"),
    "a step": (("python run_sweep.py", "skip_to: nowhere"), "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_command_is_one_line_and_nothing_runs(tmp_path, capsys, case):
    step, said = WRONG[case]
    assert main([str(book(tmp_path, ("wrong", *step), gpus=4)), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


FIRST = ("first", 'python -c "print(7)"')
FAILS = ("second", 'python -c "raise SystemExit(3)"')
LAST = ("third", 'python -c "print(9)"')


def test_steps_run_in_order_and_the_first_that_fails_ends_the_run_with_what_that_means(tmp_path, capfd):
    path = book(tmp_path, FIRST, FAILS, LAST)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 1
    said = capfd.readouterr().out
    assert "second: exit code 3" in said
    assert "this means: b" in said
    assert "--start=second" in said
    assert (tmp_path / "out" / "first.log").read_text() == "7\n"
    assert not (tmp_path / "out" / "third.log").exists()
    assert main([str(path), "--out", str(tmp_path / "out"), "--start", "third"]) == 0


def test_with_too_few_gpus_no_step_runs(tmp_path, capsys):
    path = book(tmp_path, FIRST, gpus=99)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert "the steps are for 99 GPUs, and" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_step_that_fails_may_only_skip_what_would_fail_with_it(tmp_path):
    path = book(tmp_path, (*FAILS, "skip_to: third"), ("between", FIRST[1]), LAST)
    assert main([str(path), "--out", str(tmp_path)]) == 1
    assert (tmp_path / "third.log").exists()
    assert not (tmp_path / "between.log").exists()


@pytest.mark.parametrize(("mark", "code"), [("@pytest.mark.skip\n", 1), ("", 0)])
def test_tests_that_are_all_skipped_show_nothing_and_fail(tmp_path, mark, code):
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n{mark}def test_it():\n    pass\n")
    path = book(tmp_path, ("tests", f"pytest -c /dev/null -p no:cacheprovider {tmp_path}/test_it.py"))
    assert main([str(path), "--out", str(tmp_path)]) == code


def test_a_sweep_whose_rows_are_not_as_expected_fails(tmp_path, capfd):
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "summary.csv").write_text("status,mfu_causal\nok,0.4\nok,0.1\n")
    command = f'python -c "print(7)" sweep_dir={tmp_path}/swept'
    for condition, code in (("mfu_causal > 0.05", 0), ("mfu_causal > 0.15", 1)):
        path = book(tmp_path, ("swept", command, f"rows: [{condition}]"))
        assert main([str(path), "--out", str(tmp_path)]) == code
    assert "mfu_causal > 0.15 does not hold for 1 of 2 cells" in capfd.readouterr().out
