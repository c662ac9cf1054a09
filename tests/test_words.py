"""Names and prose of the product follow the rules of tests/support/words.py."""

import pytest

from tests.support import words
from tests.support.words import (
    broken_rules,
    doubled_classes,
    doubled_modules,
    rows,
)


def test_class_names_are_unique():
    assert doubled_classes() == {}


def test_module_names_are_unique():
    assert doubled_modules() == {}


def test_product_pages_and_tests_follow_the_rules():
    assert [*rows()] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('"""Of a cell, its bytes."""', "1: a docstring begins with 'Of'"),
        ("def held(cell): ...", "1: a function is called 'held'"),
        ("def _planned(cell): ...", "1: a function is called '_planned'"),
        ("x = 1  # the rank told us", "1: 'told'"),
        ('x = f"""a\nhas so\nmany {1} ranks"""', "2: 'so\\nmany'"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, line, problem):
    file = tmp_path / "module.py"
    file.write_text(f"{line}\n")
    assert [*broken_rules(file)] == [problem]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a function that writes the files which the rules see in place of the repository's."""
    monkeypatch.setattr(words, "ROOT", tmp_path)

    def write(**texts):
        files = [tmp_path / name.replace("__", "/").replace("_", ".") for name in texts]
        for file, text in zip(files, texts.values(), strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(words, "listed", lambda *_: files)

    return write


def test_names_that_stand_twice_are_found(tree):
    tree(
        bench__a__x_py="class A: ...\n", bench__b__x_py="class A: ...\n", bench__b__facts_py="class B: ...\n"
    )
    assert doubled_classes() == {"A": ["bench/a/x.py:1", "bench/b/x.py:1"]}
    assert doubled_modules() == {"bench: x": ["bench/a/x.py", "bench/b/x.py"]}


def test_rules_of_tests_and_pages_are_applied(tree):
    tree(
        tests__a_py=f'"""What it is, told."""\n\n\ndef test_{"a" * 56}(): ...\n',
        docs__a_md="A page\ntold so.\n",
        conf__a_yaml="a: 1  # beside\n",
    )
    assert [row.partition(" has")[0] for row in rows()] == [
        f"tests/a.py:4: test_{'a' * 56}",
        "tests/a.py:1: a docstring begins with 'What'",
        "docs/a.md:2: 'told'",
        "conf/a.yaml:1: 'beside'",
    ]
