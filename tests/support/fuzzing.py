"""Strategies of hypothesis for untrusted input: bytes, JSON, and changed copies of a valid file."""

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

RULES = {
    "derandomize": True,  # the same examples in every run, so that failures are reproducible
    "deadline": None,
    "database": None,
    "suppress_health_check": [*HealthCheck],
}
LENGTHS = {"few": 60, "many": 1500}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, 1e308, "", "ok", "\ud800", "a\nb", "x" * 5000])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""Any JSON value, and numbers such as NaN that JSON does not define."""


def few_and_many(examples=LENGTHS):
    """Run the test with few examples, and as a slow test with many."""
    return pytest.mark.parametrize(
        "examples", [examples["few"], pytest.param(examples["many"], marks=pytest.mark.slow)]
    )


def fuzz(examples, check):
    """Run a check that is decorated with `given` on this number of examples."""
    settings(max_examples=examples, **RULES)(check)()


@st.composite
def changed_json(draw, sound):
    """Draw a copy of a JSON value in which one entry, at any depth, is changed, removed or added."""
    copy = json.loads(json.dumps(sound))
    holder, key = draw(st.sampled_from([*_places(copy)]))
    change = draw(st.sampled_from(["value", "removed", "new"]))
    if change == "removed":
        del holder[key]
    else:
        is_new = change == "new" and isinstance(holder, dict)
        holder[draw(st.text(max_size=8)) if is_new else key] = draw(VALUES)
    return copy


def _places(value):
    """Yield every dictionary and list in a value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


@st.composite
def changed_bytes(draw, sound):
    """Draw a copy of a file in which a few bytes are replaced, removed, inserted, repeated or cut off."""
    content = sound
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 40)))
        middle = draw(st.binary(max_size=12) | st.just(content[start:end] * 2))
        content = content[:start] + middle + content[draw(st.sampled_from([end, len(content)])) :]
    return content


def as_line(value):
    """Return a value as a line of Python's JSON, which can contain NaN."""
    return json.dumps(value).encode() + b"\n"
