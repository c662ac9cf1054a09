"""What rank 0 found of a step's gradients becomes the section, and its gate says what is wrong first."""

import math
import re

import pytest
import torch

from bench.config import OptimizerConfig
from bench.passes import PASSES, first_failure
from bench.passes.facts import RankReport
from bench.passes.objective.rank import CHANCE, SCALE_FLOORS, _norm_errors, _scale_limit
from bench.passes.objective.rank import Step as ObjectiveStep
from bench.passes.objective.section import objective_tokens
from bench.passes.objective.whole_model import GradientError, Signal
from tests import faults
from tests.cells import make_cell, run_cell, tiny_cell

CELL = make_cell("strategy=ulysses", "engine=fsdp2", "cluster.world_size=2")
FACTS = PASSES["objective"]


def section(errors, limits, **told):
    return FACTS.part(tokens=512, sequences=1, parameters=3, errors=errors, limits=limits, **told)


def test_the_section_is_that_of_the_rank_that_has_the_gradients():
    found, nothing = section({"loss": 1e-6}, {"loss": 1e-4}), section({}, {})
    reports = [RankReport({"objective": each}, {}) for each in (found, nothing)]
    assert FACTS.merge(reports, CELL) is found
    assert FACTS.gate(CELL, found) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (2e-2, "objective on engine=fsdp2: the scale is off by 2.0e-02 at 512 tokens (limit 1.0e-02)"),
        (math.inf, "objective on engine=fsdp2: the scale is missing or not finite at 512 tokens"),
        (math.nan, "objective on engine=fsdp2: the scale is missing or not finite at 512 tokens"),
    ],
)
def test_the_first_error_beyond_its_limit_is_told(error, said):
    errors = {"loss": 1e-6, "scale": error, "later": 1.0}
    assert FACTS.gate(CELL, section(errors, dict.fromkeys(errors, 1e-2))) == said


def test_what_happened_before_the_steps_is_told_before_what_they_left_behind():
    """The table of passes has the updates first."""
    updates = PASSES["updates"].merge(
        [RankReport({"updates": PASSES["updates"].part(
            shard_index=0, digests={"a": "1"}, unmoved=["a"], not_finite=[])}, {})], CELL,
    )  # fmt: skip
    sections = {"updates": updates, "objective": section({"loss": 1.0}, {"loss": 1e-4})}
    assert first_failure(CELL, sections).startswith("objective")
    assert first_failure(CELL, sections | {"objective": None}).startswith("updates")


def test_a_parameter_without_a_gradient_errs_infinitely():
    exact = Signal(1.0, {"a": torch.ones(4), "b": torch.ones(4)})
    errors = exact.gradient_errors(Signal(1.0, {"a": 1.5 * torch.ones(4)}))
    assert (errors["a"].distance, errors["a"].scale) == (0.5, 0.5)
    assert (errors["b"].distance, errors["b"].scale) == (math.inf, math.inf)


def test_what_rounding_makes_parallel_by_chance_is_allowed_and_least_in_many_numbers():
    few, many = (_scale_limit("bf16", GradientError(1e-2, 0.0, numbers), 2e-2) for numbers in (16, 2**20))
    assert few == pytest.approx(CHANCE * 2e-2 / 4)
    assert many == SCALE_FLOORS["bf16"] < few


@pytest.mark.parametrize(
    ("size", "max_grad_norm", "clipped"), [(3.0, 1.0, 1.0), (0.3, 1.0, 0.6), (3.0, 2.0, 2.0), (3.0, 0.0, 6.0)]
)
def test_the_optimizer_is_to_be_given_the_clipped_gradient(size, max_grad_norm, clipped):
    signal = Signal(1.0, {"a": size * torch.ones(3), "b": size * torch.ones(1)})
    optimizer = OptimizerConfig(max_grad_norm=max_grad_norm)
    assert _norm_errors(ObjectiveStep(signal, 2 * size, clipped), optimizer) == pytest.approx(
        {"gradient norm that the step reports": 0, "gradient norm that the optimizer was given": 0}, abs=1e-6
    )
    wrong = _norm_errors(ObjectiveStep(signal, size, 2 * clipped), optimizer)
    assert [*wrong.values()] == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    ("seq_len", "multiple", "tokens"), [(65536, 2, 1024), (256, 4, 256), (4098, 6, 1020), (4096, 2048, 2048)]
)
def test_no_more_than_1024_tokens_are_compared_unless_the_layout_needs_them(seq_len, multiple, tokens):
    assert objective_tokens(seq_len, multiple) == tokens


def test_where_float64_has_no_room_the_cell_is_ok_and_says_so(launcher, tmp_path):
    cell = tiny_cell("strategy=local", "engine=ddp")
    record, _ = run_cell(launcher, cell, tmp_path / "no_room", faults.have_no_room)
    with_room, _ = run_cell(launcher, cell, tmp_path / "room")
    assert (
        record.sections["losses"].loss == with_room.sections["losses"].loss
    )  # the step is taken all the same
    found = record.sections["objective"]
    assert (record.status, found.parameters, found.errors) == ("ok", 0, {})
    assert re.fullmatch(r"float64 on one rank would take about [\d.]+ MiB", found.reason)
    (check,) = [each for each in record.checks if each.what == "every gradient on the cell's engine"]
    assert (check.tokens, check.reason) == (None, found.reason)
