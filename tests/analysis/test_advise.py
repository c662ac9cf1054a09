"""`python -m analysis.advise`, as it is typed."""

import subprocess
import sys

import pytest

from analysis.advise import main
from bench.config import ExitCode
from bench.environment import REPOSITORY
from tests.analysis.advice.asked import QUESTION, asked

PAGE = (REPOSITORY / "docs" / "predict.md").read_text()
COMMAND = "    python -m analysis.advise "
OUTPUT = "Output, shortened (`...`):\n\n"


def test_the_page_shows_what_its_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # without records of the machine
    command = PAGE[PAGE.index(COMMAND) :].splitlines()[0]
    rest = PAGE[PAGE.index(OUTPUT) + len(OUTPUT) :].splitlines()
    lines = [line.removeprefix("    ").removesuffix("...").rstrip() for line in rest[: rest.index("")]]
    assert main(command.removeprefix(COMMAND).split()) == ExitCode.OK
    printed = iter(capsys.readouterr().out.splitlines())
    assert len(lines) > 8
    assert [line for line in lines if not any(each.startswith(line) for each in printed)] == []


def test_an_answer_for_a_calibrated_cpu_says_what_it_is_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = REPOSITORY / "results/reference/accuracy/hardware.yaml"
    words = ["hardware=calibrated", f"hardware.path={file}", "cluster.world_size=2", "seq_len=1k"]
    assert main(words) == ExitCode.OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "MiB; nothing says what it may take." in printed
    assert f"the rates in {file} leave" in printed
    assert "they do not say which strategy is faster on GPUs" in printed


def test_an_answer_takes_neither_torch_nor_pandas_nor_matplotlib(tmp_path):
    """None has a part in arithmetic, and each takes long to import."""
    code = (
        "import sys; from analysis.advise import main; code = main(sys.argv[1:]);"
        " print({'torch', 'pandas', 'matplotlib'} & {*sys.modules}); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *QUESTION, "cluster.world_size=1024"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
    assert "1024 x h100_80gb" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("seqlen=8k", "seqlen: no such key; did you mean seq_len?"),
        ("hardware=h100_80gb mode=measure", "mode=measure: nothing runs here"),
        ("hardware=h100_80gb hardware.price_per_device_hour=-1", "must be a positive number"),
        ("hardware=cpu", "hardware=cpu: its file in conf/hardware/ has no"),
        ("hardware=h100_80gb --records nowhere", "nowhere"),
        ("hardware=h100_80gb --frobnicate", "--frobnicate: no such option"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(words, said, capsys):
    assert main(words.split()) == ExitCode.REQUEST_WRONG
    answer = capsys.readouterr()
    assert said in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not answer.out


def test_lists_ask_several_questions_and_limit_how(capsys):
    words = ("strategy=ulysses,ring", "sp_degree=8", "hardware.price_per_device_hour=3.6", "--records")
    assert main([*QUESTION[:-1], "seq_len=64k,1m", *words[:-1], words[-1]]) == ExitCode.OK
    first, second = capsys.readouterr().out.split("\n\n")
    assert [line.split()[:2] for line in first.splitlines()[2:4]] == [["ulysses", "8"], ["ring", "8"]]
    assert "1m tokens cost" in first
    assert "No strategy has room for this." in second
    assert "offload.activations=true: ring sp 8 fits" in second
    assert "local" not in first + second


def test_what_cannot_be_spread_so_is_said_once_for_each_strategy():
    told = "\n".join(asked(*QUESTION[1:3], "seq_len=8k", "model=qwen2_5_0_5b").lines(whole=False))
    (refused,) = [line for line in told.splitlines() if line.startswith("Not possible: ulysses sp")]
    assert "ulysses sp 4, 8: ulysses cannot split 14 query and 2 KV heads" in refused
