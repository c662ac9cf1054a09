"""docs/choices.md has a section for each choice, and every command on it can run."""

import re
import shlex

import pytest

from bench.request.command_line import readable_by_hydra
from bench.request.composition import composed
from bench.request.legality import refusal
from bench.request.resolve import resolve
from tests.cells import TWO_CORES
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
def test_a_command_can_be_read_and_its_last_cell_can_run(command, monkeypatch):
    """Hydra takes a tenth of a second a cell, so not all are composed."""
    monkeypatch.chdir(ROOT)
    shows, *words = readable_by_hydra(shlex.split(command))
    assert shows == "-m"
    cell = resolve(composed(*(re.sub(r"=.*,", "=", word) for word in words)), TWO_CORES)
    assert refusal(cell) is None
