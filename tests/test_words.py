"""Names and prose of the product follow the rules of tests/support/words.py."""

import pytest

from tests.support.words import (
    broken_rules,
    doubled_classes,
    doubled_modules,
    long_test_names,
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


def test_a_long_test_name_is_found(tmp_path):
    file = tmp_path / "test_module.py"
    file.write_text(f"def test_{'a' * 56}(): ...\n")
    assert len([*long_test_names(file)]) == 1
