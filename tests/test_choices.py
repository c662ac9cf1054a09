"""docs/choices.md has a section with a command for each choice; test_commands.py plans them."""

import re

from tests.quantity_pages import ROOT

PAGE = ROOT / "docs" / "choices.md"
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
