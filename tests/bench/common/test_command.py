"""The command that goes on is the one that was given, with what has to change."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.common import command
from bench.common.command import TOOLS, again_command, sweep_words, tool_words
from bench.common.environment import REPOSITORY
from ulysses_ring_bench.command import main

RECORDS = REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl"
PRINTING = (
    ("run_sweep.py", "--help"),
    ("run_sweep.py", "--plan", "seq_len=256"),
    ("-m", "analysis.report", "sweep"),
    ("-m", "analysis.compare", "sweep", "sweep"),
)
GIVEN = ["run_sweep.py", "-m", "seq_len=1k,2k"]


def test_it_resumes_the_folder_of_the_sweep():
    said = again_command(GIVEN, Path("a folder"))
    assert said == "python run_sweep.py -m seq_len=1k,2k resume=true 'sweep_dir=a folder'"


@pytest.mark.parametrize("own", ["measure.repeats=2", "++measure.repeats=auto", "resume=true", "sweep_dir=x"])
def test_what_is_said_anew_stands_once(own):
    said = again_command([*GIVEN, own], Path("out"), "measure.repeats=6")
    assert said == "python run_sweep.py -m seq_len=1k,2k measure.repeats=6 resume=true sweep_dir=out"


def test_a_command_is_named_as_it_was_typed(monkeypatch, tmp_path):
    assert (sweep_words(), tool_words("analysis.report")) == (
        "python run_sweep.py",
        "python -m analysis.report",
    )
    typed = tmp_path / "ulysses-ring-bench"
    monkeypatch.setattr(sys, "argv", [str(typed), "-m", "seq_len=1k"])
    assert (sweep_words(), tool_words("analysis.report")) == (
        "ulysses-ring-bench",
        "ulysses-ring-bench report",
    )
    assert again_command(sys.argv, Path("out")).startswith("ulysses-ring-bench -m seq_len=1k resume=true")
    typed.touch(mode=0o755)
    assert tool_words("analysis.report") == f"{typed} report"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sweep_words() == "ulysses-ring-bench"


def test_a_copy_knows_no_script(monkeypatch):
    monkeypatch.setattr(command, "CHECKOUT", Path("/installed"))
    assert sweep_words() == "ulysses-ring-bench"
    assert again_command(GIVEN, Path("out")).startswith("ulysses-ring-bench -m")


def test_the_tools_are_modules_and_the_page_lists_them():
    page = (REPOSITORY / "docs" / "install.md").read_text()
    assert all(f"| `{word}` | `python -m {module}`" in page for word, module in TOOLS.items())
    assert all(map(find_spec, TOOLS.values()))


def test_the_first_word_runs_a_tool(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["ulysses-ring-bench", "report", str(tmp_path)])
    assert main() == 2
    assert "no file records.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_command_ends_well_where_the_reader_of_its_output_has_gone(words, tmp_path):
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
