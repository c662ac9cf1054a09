"""Every command in README, docs and half_hour.sh plans or runs, and the README keeps its size."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
from contextlib import redirect_stdout, suppress
from io import StringIO

import pytest

from tests.support.command import run_command_here
from tests.support.quantity_pages import ROOT

README = ROOT / "README.md"
MOST_LINES, MOST_COLUMNS = 150, 120
REFERENCE = ROOT / "results" / "reference"
HALF_HOUR = REFERENCE / "half_hour.sh"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
STANDS_FOR = {
    "TEXTS": str(ROOT / "docs"),
    "QUESTIONS": str(ROOT / "tests" / "bench" / "measure" / "quality" / "questions.jsonl"),
}
NEEDS = {
    "model.path=MODEL": "is not a checkpoint folder",
    "resume=true": "does not exist",
    "cluster=gpu": "GPU",
    "cluster=slurm": "this is no Slurm allocation",
}
"""Words that need something that this machine lacks, each with a part of the refusal."""


def commands(start):
    """Return the commands of all pages that match `start`, without comments and duplicates."""
    by_line = {}
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"^ {{4,}}({start}[^$\n]*)$", text, flags=re.MULTILINE):  # no shell variables
            words = shlex.split(line, comments=True)
            by_line.setdefault(" ".join(words), (page.name, words))
    return [pytest.param(words, id=f"{page}: {command}") for command, (page, words) in by_line.items()]


def test_readme_has_at_most_150_lines_of_120_columns():
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize("words", commands(r"python run_sweep\.py"))
def test_documented_sweep_can_be_planned(words, tmp_path):
    shown = re.sub(r"[A-Z]+\b", lambda m: STANDS_FOR.get(m[0], m[0]), " ".join(words[2:]))
    words = shown.replace("=results/reference", f"={ROOT}/results/reference").split()
    plans = [] if {"--help", "--help-all", "--plan"} & {*words} else ["--plan"]
    done = run_command_here(tmp_path, *plans, *words)
    messages = [message for word, message in NEEDS.items() if word in words]
    if messages:
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert messages[0] in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("words", commands("python -m (?:bench|analysis)"))
def test_documented_tool_has_its_documented_options(words, monkeypatch):
    module = importlib.import_module(words[2] if words[2].startswith("analysis") else f"{words[2]}.__main__")
    monkeypatch.setattr(sys, "argv", [words[2], "--help"])
    with redirect_stdout(StringIO()) as output, suppress(SystemExit):
        module.main()
    assert "usage:" in output.getvalue()
    assert [word for word in words[3:] if word.startswith("--") and word not in output.getvalue()] == []


FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$LOG"
[[ $* != *local_work* ]]
"""


@pytest.fixture(scope="module")
def half_hour(tmp_path_factory):
    """Return the result of the script with a fake `python`, which fails once, and its arguments."""
    folder = tmp_path_factory.mktemp("half_hour")
    python, log = folder / "python", folder / "log"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "OUT": str(folder / "out")}
    done = subprocess.run(
        ["bash", HALF_HOUR],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, log.read_text().splitlines()


def test_half_hour_continues_after_a_failure_and_packs_all(half_hour):
    done, words = half_hour
    assert done.returncode == 1
    *_, local_work, hang = done.stdout.splitlines()
    assert local_work.startswith("failed: local_work (exit code 1, ")
    assert hang.startswith("failed: hang ")  # the fake python starts no rank
    with tarfile.open(
        next(line.removeprefix("send back: ") for line in done.stdout.splitlines() if "send" in line)
    ) as packed:
        names = packed.getnames()
    assert {"./machine.txt", "./steps.txt", "./local_work.log"} <= {*names}
    files = {word for line in words for word in line.split() if word.startswith(("results/", "tests/"))}
    assert len(files) == 3
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_half_hour_sweeps_can_be_planned(half_hour, tmp_path):
    sweeps = [line.split() for line in half_hour[1] if line.startswith("run_sweep.py")]
    assert len(sweeps) == 5
    for _, *words in sweeps:
        done = run_command_here(
            tmp_path, "--plan", *(each for each in words if not each.startswith("sweep_dir="))
        )
        assert done.returncode == 0, done.stderr


def test_half_hour_refuses_an_unknown_part(tmp_path):
    done = subprocess.run(
        ["bash", HALF_HOUR, "5"],
        env=os.environ | {"OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "failed: 5: no such part" in done.stdout) == (1, True)
