"""`--help` lists every common key, `--help-all` every key and every option of a choice."""

import re

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.common.environment import REPOSITORY
from bench.config import DTYPE_BYTES, LEASE_POLICIES, MASKS, PACKING, SCHEDULES
from bench.request.choices import default_strategies, groups, options
from bench.request.command_line import PLAN_OPTION, SHOW_OPTIONS, SWEEP_OPTIONS
from bench.request.help import COMMON_KEYS, MAX_LINE, OPTIONS, help_text, option_description
from bench.request.modes import MODE_NAMES
from bench.request.resolve import LOSSES, all_keys
from tests.support.command import COMMAND, run_command_here

SECTIONS = ("offload", "quality", "replay")
"""Fields of a cell that are sections and no keys."""
KEYS = [key for key in all_keys() if not key.endswith(".name") and key not in SECTIONS]
KEY = re.compile(r"^  ([a-z_.]+)(?:=\S+(?: {host})?)?  +[^\s\[]", re.MULTILINE)
"""Line of a key that has more text than its allowed words."""


@pytest.fixture(scope="module")
def page():
    return help_text(whole=True)


def test_help_lists_every_key_and_at_most_40_common_ones(page):
    assert {*KEY.findall(page)} == {*KEYS}
    assert {*KEY.findall(help_text())} == {*COMMON_KEYS}
    assert len(COMMON_KEYS) <= 40
    assert not {"inject_fault", "data.rank_order", "cluster.backend"} & {*KEYS}


@pytest.mark.parametrize("group", groups())
def test_help_lists_every_option_and_marks_one_default(group, page):
    names = options(group)
    for name in names:
        assert option_description(group, name)
        assert len(names) == 1 or re.search(rf"^  [*m ] {group}={name}  +\S", page, re.MULTILINE)
    assert len(names) == 1 or len(re.findall(rf"^  \* {group}=", page, re.MULTILINE)) == 1
    assert group not in COMMON_KEYS or f"[{', '.join(names)}]" in " ".join(help_text().split())


def test_help_states_the_default_strategies_of_a_sweep(page):
    sweep = ", ".join(default_strategies())
    for text in (page, help_text()):
        assert f"default of a single cell, while a sweep (-m) runs {sweep}" in " ".join(text.split())
    assert sorted(re.findall(r"^  m strategy=(\w+)", page, re.MULTILINE)) == sorted(default_strategies())


def test_help_lists_the_allowed_words_of_values(page):
    flat = " ".join(page.split())
    for words in (
        DTYPE_BYTES,
        LAYOUTS,
        KERNEL_FACTS,
        LOSSES,
        ("cpu", "cuda"),
        MASKS,
        LEASE_POLICIES,
        PACKING,
        SCHEDULES,
    ):
        assert ", ".join(words) in flat
    assert all(re.search(rf"\b{mode}\b", flat) for mode in MODE_NAMES)


def test_help_lists_every_command_line_option():
    named = " ".join(option for option, _ in OPTIONS)
    assert not {*SHOW_OPTIONS, *SWEEP_OPTIONS, PLAN_OPTION} - {*re.findall(r"--?[\w-]+", named)}


@pytest.mark.parametrize(("option", "whole"), [("--help", False), ("-h", False), ("--help-all", True)])
def test_command_prints_help_with_three_examples(tmp_path, option, whole):
    done, page = run_command_here(tmp_path, option), help_text(whole=whole)
    head, *rest = done.stdout.strip().partition("\nChoices ")
    assert (done.returncode, rest, done.stderr) == (0, [*page.partition("\nChoices ")[1:]], "")
    assert head.count(f"  python {COMMAND[1]} ") == 3  # as it was typed
    assert len(re.findall(r"^  python run_sweep\.py", page, flags=re.MULTILINE)) == 3
    assert max(map(len, page.splitlines())) <= MAX_LINE
    assert "docs/choices.md" in page
    assert (REPOSITORY / page.splitlines()[-1].rpartition(" ")[2]).is_file()
