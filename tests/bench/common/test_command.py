"""Command lines in messages, and the command `ulysses-ring-bench`."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.common import command
from bench.common.command import TOOLS, resume_command, sweep_command, tool_command
from bench.common.environment import REPOSITORY
from ulysses_ring_bench.command import main

RECORDS = REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl"
PRINTING = (
    ("run_sweep.py", "--help"),
    ("run_sweep.py", "--plan", "seq_len=256"),
    ("-m", "analysis.report", "sweep"),
    ("-m", "analysis.compare", "sweep", "sweep"),
)
ARGUMENTS = ["run_sweep.py", "-m", "seq_len=1k,2k"]


def test_again_command_resumes_the_sweeps_folder():
    line = resume_command(ARGUMENTS, Path("a folder"))
    assert line == "python run_sweep.py -m seq_len=1k,2k resume=true 'sweep_dir=a folder'"


@pytest.mark.parametrize("old", ["measure.repeats=2", "++measure.repeats=auto", "resume=true", "sweep_dir=x"])
def test_again_command_has_a_replaced_option_once(old):
    line = resume_command([*ARGUMENTS, old], Path("out"), "measure.repeats=6")
    assert line == "python run_sweep.py -m seq_len=1k,2k measure.repeats=6 resume=true sweep_dir=out"


def test_commands_keep_the_program_that_was_typed(monkeypatch, tmp_path):
    assert (sweep_command(), tool_command("analysis.report")) == (
        "python run_sweep.py",
        "python -m analysis.report",
    )
    typed = tmp_path / "ulysses-ring-bench"
    monkeypatch.setattr(sys, "argv", [str(typed), "-m", "seq_len=1k"])
    assert (sweep_command(), tool_command("analysis.report")) == (
        "ulysses-ring-bench",
        "ulysses-ring-bench report",
    )
    assert resume_command(sys.argv, Path("out")).startswith("ulysses-ring-bench -m seq_len=1k resume=true")
    typed.touch(mode=0o755)
    assert tool_command("analysis.report") == f"{typed} report"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sweep_command() == "ulysses-ring-bench"


def test_installed_copy_names_the_command_not_the_script(monkeypatch):
    monkeypatch.setattr(command, "CHECKOUT", Path("/installed"))
    assert sweep_command() == "ulysses-ring-bench"
    assert resume_command(ARGUMENTS, Path("out")).startswith("ulysses-ring-bench -m")


def test_tools_are_modules_that_install_md_lists():
    page = (REPOSITORY / "docs" / "install.md").read_text()
    assert all(f"| `{word}` | `python -m {module}`" in page for word, module in TOOLS.items())
    assert all(map(find_spec, TOOLS.values()))


def test_command_runs_the_tool_named_by_its_first_word(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["ulysses-ring-bench", "report", str(tmp_path)])
    assert main() == 2
    assert "no file records.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_commands_succeed_after_the_reader_of_output_exits(words, tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    shutil.copy(RECORDS, sweep)
    reading, writing = os.pipe()
    os.close(reading)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    program = (
        [sys.executable, *words] if words[0] == "-m" else [sys.executable, REPOSITORY / words[0], *words[1:]]
    )
    done = subprocess.run(
        program, cwd=tmp_path, env=env, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert (sweep / "report.html").exists() == ("analysis.report" in words)
