"""`--help` has a line for every key, option of a choice and option of the command line."""

import re

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.config import DTYPE_BYTES, MASKS
from bench.environment import REPOSITORY
from bench.request.choices import default_strategies, groups, options
from bench.request.command_line import PLAN_OPTION, SHOWING, SWEEP_OPTIONS
from bench.request.help import COLUMNS, IN_CONFIG, OPTIONS, described, help_text
from bench.request.resolve import LOSSES, all_keys
from tests.command import COMMAND, typed_here

KEYS = [key for key in all_keys() if not key.endswith("name") and key not in (*groups(), *IN_CONFIG)]


@pytest.fixture(scope="module")
def page():
    return help_text()


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_line(key, page):
    line = rf"^  {re.escape(key)}(=\S+)?\s+[^\s\[]"  # more than the words that it may be
    assert re.search(line, page, flags=re.MULTILINE)


@pytest.mark.parametrize("group", groups())
def test_every_option_of_a_choice_has_a_line_and_one_is_the_default(group, page):
    for name in options(group):
        assert described(group, name)
        assert len(options(group)) == 1 or re.search(rf"^  [* ] {group}={name}  +\S", page, re.MULTILINE)
    assert len(options(group)) == 1 or len(re.findall(rf"^  \* {group}=", page, re.MULTILINE)) == 1


def test_the_words_that_a_value_may_be_are_named(page):
    flat = " ".join(page.split())
    for words in (DTYPE_BYTES, LAYOUTS, KERNEL_FACTS, LOSSES, ("cpu", "cuda"), ("nccl", "gloo"), MASKS):
        assert ", ".join(words) in flat


def test_every_option_of_the_command_line_is_named():
    named = " ".join(option for option, _ in OPTIONS)
    assert not {*SHOWING, *SWEEP_OPTIONS, PLAN_OPTION} - {*re.findall(r"--?[\w-]+", named)}


def test_the_command_prints_it_and_three_examples(tmp_path, page):
    for option in ("--help", "-h"):
        said = typed_here(tmp_path, option)
        head, *rest = said.stdout.strip().partition("\nChoices ")
        assert (said.returncode, rest, said.stderr) == (0, [*page.partition("\nChoices ")[1:]], "")
        assert head.count(f"  python {COMMAND[1]} ") == 3  # as it was typed
    assert ", ".join(default_strategies()) in page
    assert len(re.findall(r"^  python run_sweep\.py", page, flags=re.MULTILINE)) == 3
    assert max(map(len, page.splitlines())) <= COLUMNS
    assert "docs/choices.md" in page
    assert (REPOSITORY / page.splitlines()[-1].rpartition(" ")[2]).is_file()
