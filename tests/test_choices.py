"""docs/choices.md has a section for each choice, and every command on it can be planned."""

import re
import shlex

import pytest

from tests.command import typed_here
from tests.quantity_pages import ROOT

PAGE = ROOT / "docs" / "choices.md"
COMMANDS = re.findall(r"^    python run_sweep\.py (.*)$", PAGE.read_text(), flags=re.MULTILINE)
SECTIONS = {
    "Strategy": "strategy=",
    "Layout": "layout=",
    "usp's degrees": "ulysses_degree=",
    "Engine": "engine=",
    "Checkpointing": "checkpointing=",
    "Loss and tiled MLP": "tiled_mlp=",
    "Kernels": "kernel=",
    "Offloads": "offload.activations=",
    "How much is measured": "measure.repeats=",
    "Cluster": "cluster=",
    "Hardware": "hardware.path=",
    "Mode": "mode=predict",
}
"""Each choice's heading, and a word that its command must have."""


def test_every_choice_has_a_section_with_a_command_of_its_own():
    parts = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", PAGE.read_text(), flags=re.MULTILINE))
    for heading, word in SECTIONS.items():
        commands = re.findall(r"^    python run_sweep\.py (.*)$", parts[heading], flags=re.MULTILINE)
        assert any(word in command for command in commands), heading


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_planned_and_some_of_it_can_run(command):
    said = typed_here(ROOT, *shlex.split(command), "--plan")
    assert said.returncode == 0, said.stderr
    assert re.match(r"plan of \d+ cells", said.stdout)
    last = re.findall(r"(?:fits|undecided|does not fit|unknown)$", said.stdout, flags=re.MULTILINE)
    assert last, said.stdout
