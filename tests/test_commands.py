"""Every command that README, docs and first_hour.sh show plans or runs, and the README keeps its size."""

import importlib
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO

import pytest

from tests.command import typed_here
from tests.quantity_pages import ROOT

README = ROOT / "README.md"
MOST_LINES, MOST_COLUMNS = 150, 120
REFERENCE = ROOT / "results" / "reference"
FIRST_HOUR = REFERENCE / "first_hour.sh"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), FIRST_HOUR]
STANDS_FOR = {
    "TEXTS": str(ROOT / "docs"),
    "MACHINE.yaml": str(REFERENCE / "accuracy" / "hardware.yaml"),
}
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
    shown = re.sub(r"[A-Z]+(?:\.yaml)?\b", lambda m: STANDS_FOR.get(m[0], m[0]), " ".join(words[2:]))
    words = shown.replace("=results/reference", f"={ROOT}/results/reference").split()
    plans = [] if {"--help", "--plan"} & {*words} else ["--plan"]
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


def test_the_first_hour_starts_at_any_step_and_names_tests_that_are_there():
    assert subprocess.run(["bash", "-n", FIRST_HOUR], check=False).returncode == 0
    beyond = subprocess.run(["bash", FIRST_HOUR, "99"], capture_output=True, text=True, check=False)
    assert (beyond.returncode, beyond.stdout, beyond.stderr) == (0, "", "")
    files = re.findall(r"tests/\S+", FIRST_HOUR.read_text())
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
