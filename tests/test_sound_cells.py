"""Shares of limits and checks that were not made, as `tests.support.sound_cells` prints them."""

import itertools

import pytest
from msgspec import to_builtins

from bench.measure.check import Check
from tests.support.cells import make_cell
from tests.support.records import as_record, make_record
from tests.support.sound_cells import CELLS, CELLS_PER_SWEEP, checks_line, lines_of, shares_of

CONFIG = {"seed": 1}


def compared_record():
    """Return the record of a cell that is half a limit from the next one, and of its reference."""
    expected = make_record(config={**CONFIG, "strategy": "local"}, parity=None)
    expected["losses"] |= {"loss": [2.0, 2.0], "grad_norm": [1.0, 1.0]}
    match = {"parameter": "norm.weight", "parameters": 3, "below_noise": 0, "difference": 0.3, "limit": 0.4}
    losses = expected["losses"] | {
        "loss": [2.0, 2.0 + 1e-4 * 2**0.5],
        "compared_with": expected["cell_id"],
        "compared_steps": 2,
        "compared_within": {"loss": 2e-4, "grad_norm": 3e-2},
        "gradient_match": match,
    }
    parity = {"tokens": 512, "errors": {"dq": 0.1, "out": 0.02}, "limits": {"dq": 0.4, "out": 0.1}}
    record = make_record(config=CONFIG, losses=losses, parity=parity)
    return as_record(record), as_record(expected)


def test_shares_are_those_of_every_error_and_limit():
    largest = {(one.check, one.quantity): one.share for one in shares_of(compared_record())}
    assert largest == pytest.approx({
        ("parity", "dq"): 0.25,
        ("parity", "out"): 0.2,
        ("gradient_match", "parameter norm.weight"): 0.75,
        ("loss", "step 0"): 0,
        ("loss", "step 1"): 0.25,
        ("grad_norm", "step 0"): 0,
        ("grad_norm", "step 1"): 0,
    })  # fmt: skip


def test_lines_name_failed_cells_and_the_largest_shares():
    record, reference = compared_record()
    wrong = as_record(make_record(config=CONFIG, status="wrong_result", reason="it is off"))
    lines = lines_of([record, reference, wrong], [*shares_of([record, reference])])
    assert lines[:2] == [
        "2 of 3 sound cells are ok",
        "qwen3_nano ulysses zero3 8192 1: wrong_result: it is off",
    ]
    (line,) = (line for line in lines if line.startswith("parity"))
    assert line.split(maxsplit=2) == ["parity", "0.25", "qwen3_nano ulysses zero3 8192 1: dq"]


def test_a_check_that_compared_some_steps_was_made():
    checks = [
        Check(what="tokens", against="the data", steps=4, of_steps=4),
        Check(
            what="losses", against="another cell", steps=2, of_steps=4, reason="two steps", below_noise="x"
        ),
        Check(what="signal", against="another cell", steps=0, compares_training=True, reason="no reference"),
        Check(what="attention", against="float64", reason="too long"),
    ]
    record = as_record(make_record(checks=[*map(to_builtins, checks)]))
    failed = as_record(make_record(checks=None))
    line = checks_line("cpu", [record, failed])
    assert line.startswith("cpu: 4 checks, 50.0% not made, 25.0% below noise, most often: ")
    assert checks_line("none", [failed]) == "none: 0 checks, 0.0% not made, 0.0% below noise"


def test_the_words_of_sound_cells_make_thirty_cells():
    axes = [
        [f"{key}={value}" for value in values.split(",")]
        for key, _, values in (w.partition("=") for w in CELLS)
    ]
    cells = [make_cell(*words) for words in itertools.product(*axes)]
    assert len({cell.cell_id for cell in cells}) == len(cells) == CELLS_PER_SWEEP
