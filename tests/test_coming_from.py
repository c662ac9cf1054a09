"""Every key of another stack on docs/coming_from.md gets an answer that names the key of its column."""

import re

import pytest

from bench.common.environment import REPOSITORY
from bench.request.choices import groups
from bench.request.resolve import all_keys
from bench.request.values import nearest, not_offered

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("\n## ")[0].splitlines()
    if line.startswith("|")
]
HERE = [re.findall(r"`(\w+)", cell)[0] for cell in ROWS[0][1:]]
SPANS = [
    (row[0], key, span)
    for row in ROWS[2:]
    for key, cell in zip(HERE, row[1:], strict=True)
    for span in re.findall(r"`([^`]+)`", cell)
]
INSIDE = "{name: deepspeed}"
"""Second value of a key that the cell states once."""


def key_of(span):
    """Return the key of `--key value`, `key=value` or `key: value`, as it is written on our command line."""
    return re.split(r"[=: ]+", span.lstrip("-"))[0].replace("-", "_")


@pytest.mark.parametrize(("stack", "key", "span"), [row for row in SPANS if row[2] != INSIDE])
def test_key_of_another_stack_is_answered_with_ours(stack, key, span):
    theirs = key_of(span)
    known = [*all_keys(), *groups()]
    answer = not_offered(theirs)
    names = {key} | ({"strategy.rotation"} if key == "strategy" else set())
    if answer is None:
        assert theirs.rpartition(".")[2] == key or nearest(theirs, known) in names
    else:
        assert key in answer


def test_page_has_nine_stacks_and_keys_that_exist():
    assert len(ROWS) == 2 + 9
    assert {*HERE} <= {*all_keys(), *groups()}
    assert len(SPANS) > 60
