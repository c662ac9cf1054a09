"""Every command that README, docs and half_hour.sh show plans or runs, and the README keeps its size."""

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

from tests.support.command import typed_here
from tests.support.quantity_pages import ROOT

README = ROOT / "README.md"
MOST_LINES, MOST_COLUMNS = 150, 120
REFERENCE = ROOT / "results" / "reference"
HALF_HOUR = REFERENCE / "half_hour.sh"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
STANDS_FOR = {"TEXTS": str(ROOT / "docs")}
NEEDS = {
    "model.path=MODEL": "is not a checkpoint folder",
    "resume=true": "does not exist",
    "cluster=gpu": "GPU",
}
"""What a machine without that is told, in one line."""


def commands(start):
    """By page the shown commands that begin so, without their comments, each once."""
    found = {}
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"^ {{4,}}({start}[^$\n]*)$", text, flags=re.MULTILINE):  # no shell variables
            words = shlex.split(line, comments=True)
            found.setdefault(" ".join(words), (page.name, words))
    return [pytest.param(words, id=f"{page}: {command}") for command, (page, words) in found.items()]


def test_the_readme_fits_its_size():
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize("words", commands(r"python run_sweep\.py"))
def test_a_sweep_that_is_shown_can_be_planned(words, tmp_path):
    shown = re.sub(r"[A-Z]+\b", lambda m: STANDS_FOR.get(m[0], m[0]), " ".join(words[2:]))
    words = shown.replace("=results/reference", f"={ROOT}/results/reference").split()
    plans = [] if {"--help", "--help-all", "--plan"} & {*words} else ["--plan"]
    done = typed_here(tmp_path, *plans, *words)
    refused = [said for word, said in NEEDS.items() if word in words]
    if refused:
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert refused[0] in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("words", commands("python -m (?:bench|analysis)"))
def test_a_tool_that_is_shown_knows_its_options(words, monkeypatch):
    module = importlib.import_module(words[2] if words[2].startswith("analysis") else f"{words[2]}.__main__")
    monkeypatch.setattr(sys, "argv", [words[2], "--help"])
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        module.main()
    assert "usage:" in said.getvalue()
    assert [word for word in words[3:] if word.startswith("--") and word not in said.getvalue()] == []


NOTES_ITS_WORDS = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$SAID"
[[ $* != *local_work* ]]
"""


@pytest.fixture(scope="module")
def half_hour(tmp_path_factory):
    """How the script ends with a `python` that only notes its words and fails once, and those words."""
    folder = tmp_path_factory.mktemp("half_hour")
    python, said = folder / "python", folder / "said"
    python.write_text(NOTES_ITS_WORDS)
    python.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(said), "OUT": str(folder / "out")}
    done = subprocess.run(
        ["bash", HALF_HOUR],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, said.read_text().splitlines()


def test_the_half_hour_goes_on_after_a_failure_names_it_and_packs_everything(half_hour):
    done, words = half_hour
    assert done.returncode == 1
    *_, local_work, hang = done.stdout.splitlines()
    assert local_work.startswith("failed: local_work (exit code 1, ")
    assert hang.startswith("failed: hang ")  # nothing ran, so no rank was found
    with tarfile.open(
        next(line.removeprefix("send back: ") for line in done.stdout.splitlines() if "send" in line)
    ) as packed:
        names = packed.getnames()
    assert {"./machine.txt", "./steps.txt", "./local_work.log"} <= {*names}
    files = {word for line in words for word in line.split() if word.startswith(("results/", "tests/"))}
    assert len(files) == 3
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_sweeps_of_the_half_hour_can_be_planned(half_hour, tmp_path):
    sweeps = [line.split() for line in half_hour[1] if line.startswith("run_sweep.py")]
    assert len(sweeps) == 5
    for _, *words in sweeps:
        done = typed_here(tmp_path, "--plan", *(each for each in words if not each.startswith("sweep_dir=")))
        assert done.returncode == 0, done.stderr


def test_the_half_hour_refuses_an_unknown_part(tmp_path):
    done = subprocess.run(
        ["bash", HALF_HOUR, "5"],
        env=os.environ | {"OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "failed: 5: no such part" in done.stdout) == (1, True)
