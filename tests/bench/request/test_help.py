"""`--help` has a line for every key, option of a choice and option of the command line."""

import re
import sys

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.config import DTYPE_BYTES
from bench.environment import REPOSITORY
from bench.request.choices import default_strategies, groups, options
from bench.request.command_line import PLAN_OPTION, SHOWING, SWEEP_OPTIONS
from bench.request.help import COLUMNS, OPTIONS, described, help_text, words_of
from bench.request.resolve import LOSSES, all_keys
from bench.strategies import STRATEGIES
from bench.strategies.options import in_words
from tests.command import COMMAND, typed_here

KEYS = [key for key in all_keys() if not key.endswith("name") and key not in (*groups(), "offload")]
WORDS = {
    "dtype": DTYPE_BYTES,
    "layout": LAYOUTS,
    "kernel": KERNEL_FACTS,
    "loss": LOSSES,
    "cluster.device": ("cpu", "cuda"),
    "cluster.backend": ("nccl", "gloo"),
    "workload.mask": ("causal", "full"),
    **{
        f"strategy.{key}": (in_words(option),)
        for facts in STRATEGIES.ours.values()
        for key, option in facts.options.items()
        if isinstance(option, tuple)
    },
}


@pytest.fixture(scope="module")
def page():
    return help_text()


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_line(key, page):
    assert re.match(r"[^\[]", words_of(key) or "")  # more than the words that it may be
    assert re.search(rf"^  {re.escape(key)}(=\S+)?  ", page, flags=re.MULTILINE)


@pytest.mark.parametrize("group", groups())
def test_every_option_of_a_choice_has_a_line_and_one_is_the_default(group, page):
    for name in options(group):
        assert described(group, name)
        assert len(options(group)) == 1 or re.search(rf"^  [* ] {group}={name}  +\S", page, re.MULTILINE)
    assert len(options(group)) == 1 or len(re.findall(rf"^  \* {group}=", page, re.MULTILINE)) == 1


@pytest.mark.parametrize("key", WORDS)
def test_the_words_that_a_value_may_be_are_named(key):
    assert ", ".join(WORDS[key]) in words_of(key)


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


def test_the_page_ends_with_where_every_command_is(page):
    address = page.splitlines()[-1].rpartition(" ")[2]
    assert (REPOSITORY / address).is_file()


def test_a_long_way_to_the_script_is_no_error(monkeypatch):
    script = f"/{'x' * 90}/run_sweep.py"
    monkeypatch.setattr(sys, "argv", [script])
    page = help_text()
    assert page.count(f"\n  python {script} ") == 3
    assert max(len(line) for line in page.splitlines() if script not in line) <= COLUMNS
