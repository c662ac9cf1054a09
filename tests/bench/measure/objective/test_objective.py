"""The objective pass: errors and limits of gradients, gate, checks and compared parameters."""

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench.config import OptimizerConfig
from bench.measure import PASSES
from bench.measure.objective.coverage import coverages, gradient_bytes, needed_bytes
from bench.measure.objective.gradient_noise import (
    ALONG_FACTOR,
    CHANCE,
    FACTOR,
    WHOLE_FACTOR,
    ExactGradient,
    GradientError,
    GradientNoise,
    StepLoss,
    gradient_errors,
    whole_scale,
)
from bench.measure.objective.section import objective_tokens
from bench.measure.objective.step_errors import ObjectiveStep, norm_errors
from bench.measure.objective.whole_model import mean_of_ranks
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.parameters import parameters
from tests.support.cells import FOUR_H100, make_cell, run_cell, tiny_cell
from tests.support.faults import acts
from tests.support.faults.classes import engine, tokens

CELL = make_cell("strategy=ulysses", "engine=fsdp2", "cluster.world_size=2")
FACTS = PASSES["objective"]


def section(errors, limits, **fields):
    return FACTS.part_type(tokens=512, sequences=1, parameters=3, errors=errors, limits=limits, **fields)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (2e-2, ("off by 2.0e-02", "limit 1.0e-02")),
        (math.inf, ("missing or not finite",)),
        (math.nan, ("missing or not finite",)),
    ],
)
def test_objective_gate_reports_the_first_error_beyond_its_limit(error, words):
    errors = {"loss": 1e-6, "scale": error, "later": 1.0}
    reason = FACTS.gate(CELL, section(errors, dict.fromkeys(errors, 1e-2)))
    assert reason.startswith("objective on engine=fsdp2: the scale is ")
    assert all(word in reason for word in (*words, "at 512 tokens"))


def errors_of(exact, gradients, eps=0.0):
    """Return the errors of gradients by name, one parameter after another as the pass compares them."""
    differences = {
        name: ExactGradient.from_tensor(gradient).difference(gradients.get(name))
        for name, gradient in exact.items()
    }
    return gradient_errors(differences, eps)


def test_gradient_errors_of_a_missing_and_a_nearly_zero_gradient():
    """The error of a missing gradient is infinite, that of a nearly zero one relative to the whole."""
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(4), "bias": torch.tensor([1e-9, 0])}
    gradients = {"a": 1.5 * exact["a"], "bias": torch.tensor([1e-3, 0.0])}
    errors, by_whole = errors_of(exact, gradients), errors_of(exact, gradients, eps=0.01)
    assert (errors["a"].distance, errors["a"].scale) == (0.5, 0.5)
    assert (errors["b"].distance, errors["b"].scale) == (math.inf, math.inf)
    assert errors["bias"].distance > 1e5
    assert by_whole["bias"].distance == pytest.approx(1e-3 / (0.01 * 29**0.5), rel=1e-3)


def test_scale_limit_grows_for_gradients_of_few_numbers():
    """A random deviation is parallel to the gradient by chance, the more the fewer numbers it has."""
    noise = GradientNoise(0.0, 1e-2, 1e-3, 0.0, {str(n): GradientError(1e-2, 5e-4, n) for n in (16, 2**20)})
    few, many = (noise.limits(str(n), "bf16", 2e-2) for n in (16, 2**20))
    assert few.distance == many.distance == pytest.approx(FACTOR * 1e-2)
    assert few.scale == pytest.approx(CHANCE * 2e-2 / 4)
    assert many.scale == pytest.approx(ALONG_FACTOR * 1e-2)
    by_scale = replace(noise, scale=1e-2).limits(str(2**20), "bf16", 2e-2)
    assert by_scale.scale == pytest.approx(FACTOR * 1e-2)
    assert noise.limits("16", "bf16", 1.0).scale == pytest.approx(CHANCE * FACTOR * 1e-2 / 4)


def test_whole_scale_finds_a_factor_that_no_parameter_shows():
    exact = {str(n): torch.ones(4096) for n in range(16)}

    def with_factors(factors):
        scaled = {n: factor * x for factor, (n, x) in zip(factors, exact.items(), strict=True)}
        return errors_of(exact, scaled)

    noise = GradientNoise.from_controls([0.0], [with_factors([1.002, 0.998] * 8)])
    errors = with_factors([1.0075] * 16)
    assert all(error.scale < noise.limits(n, "bf16", error.distance).scale for n, error in errors.items())
    assert noise.whole_scale == pytest.approx(0.0, abs=1e-6)
    assert whole_scale(errors) == pytest.approx(7.5e-3, rel=1e-3)
    assert noise.whole_limit("bf16") == pytest.approx(WHOLE_FACTOR * 2e-3 / 4, rel=1e-3)


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_errors_after_division_equal_those_of_divided_gradients(size):
    """The exact gradient of b may be so small that rounding outweighs it."""
    exact = {"a": torch.randn(64), "b": size * torch.randn(8)}
    wrong = {name: 3 * x + 0.01 * torch.randn(x.shape) for name, x in exact.items()}
    of_wrong = errors_of(exact, wrong, eps=1e-3)
    right = errors_of(exact, {name: x / 3 for name, x in wrong.items()}, eps=1e-3)
    for name, error in of_wrong.items():
        divided = error.divided_by(3)
        assert divided.distance == pytest.approx(right[name].distance, rel=1e-4)
        assert divided.scale == pytest.approx(right[name].scale, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "gradient", [{"a": torch.full((2,), math.nan)}, {"a": torch.full((2,), math.inf)}, {}]
)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_division_mends_no_missing_or_infinite_gradient(gradient, factor):
    (error,) = errors_of({"a": torch.ones(2)}, gradient).values()
    assert not error.divided_by(factor).distance < 1e9


@pytest.mark.parametrize(
    ("gradient", "count"),
    [([1.0] * 8, 8), ([1.0] + [1e-3] * 7, 1), ([1e-90] * 2 + [0.0] * 6, 2), ([0.0] * 8, 8)],
)
def test_effective_count_of_a_gradient_ignores_small_numbers(gradient, count):
    """Three of the 32 numbers of a head's norm may dominate, and rounding is then parallel by chance."""
    exact = ExactGradient.from_tensor(torch.tensor(gradient, dtype=torch.float64))
    assert exact.effective_count == pytest.approx(count, rel=1e-3)


def test_noise_is_the_root_mean_square_of_the_controls():
    """Errors of blocks of rows with opposite signs do not cancel."""
    exact, loss = {"a": torch.tensor([3.0, 4.0])}, StepLoss(2.0, torch.tensor([1.0, 1.0]))
    noise = GradientNoise.from_controls(
        [loss.block_error(StepLoss(2.0, torch.tensor([1 + off, 1 - off]))) for off in (0.3, 0.4)],
        [errors_of(exact, {"a": torch.tensor([3.0, 4.0 + off])}) for off in (0.3, 0.4)],
    )
    root = math.sqrt((0.3**2 + 0.4**2) / 2)
    assert noise.loss == pytest.approx(root)
    assert noise.gradients["a"].distance == pytest.approx(root / 5)
    assert noise.gradients["a"].scale == pytest.approx(root * 4 / 25)
    assert noise.grad_norm == pytest.approx(noise.gradients["a"].distance)
    assert noise.scale == pytest.approx(noise.gradients["a"].scale)


@pytest.mark.parametrize(("size", "hidden"), [(0.3, False), (0.1, True)])
def test_mistake_no_larger_than_rounding_is_below_noise(size, hidden):
    mistakes = {"mistakes": {"a": 0.5, "b": size}, "mistake_limits": {"a": 0.2, "b": 0.2}}
    (check,) = FACTS.checks(CELL, section({"loss": 0.0}, {"loss": 1.0}, **mistakes))
    if hidden:
        assert re.match("b would .* 1.0e-01; rounding .* 2.0e-01$", check.below_noise)
    else:
        assert check.below_noise is None


def test_mean_of_ranks_weighs_the_mean_of_each_rank_equally():
    strategy = SimpleNamespace(
        cell=SimpleNamespace(sp_degree=2),
        facts=SimpleNamespace(slices=lambda cell, tokens, rank: [slice(2 * rank, 2 * rank + 2)]),
    )
    labels = torch.tensor([[IGNORED_LABEL, 5, 5, 5]])
    batch = SimpleNamespace(labels=labels)
    assert mean_of_ranks(strategy, [batch])(batch)[0].tolist() == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("size", "max_grad_norm", "clipped"), [(3.0, 1.0, 1.0), (0.3, 1.0, 0.6), (3.0, 2.0, 2.0), (3.0, 0.0, 6.0)]
)
def test_norm_errors_compare_the_optimizer_with_the_clipped_norm(size, max_grad_norm, clipped):
    optimizer = OptimizerConfig(max_grad_norm=max_grad_norm)
    right = ObjectiveStep(loss=1.0, gradients={}, norm=2 * size, reported_norm=2 * size, given_norm=clipped)
    assert norm_errors(right, optimizer) == pytest.approx(
        {"gradient norm that the step reports": 0, "gradient norm that the optimizer was given": 0}, abs=1e-6
    )
    wrong = norm_errors(replace(right, reported_norm=size, given_norm=2 * clipped), optimizer)
    assert [*wrong.values()] == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    ("seq_len", "multiple", "tokens"), [(65536, 2, 1024), (256, 4, 256), (4098, 6, 1020), (4096, 2048, 2048)]
)
def test_objective_tokens_are_1024_unless_the_layout_needs_more(seq_len, multiple, tokens):
    assert objective_tokens(seq_len, multiple) == tokens


def test_objective_without_room_for_float64_gives_a_reason(launcher, tmp_path):
    cell = tiny_cell("strategy=local", "engine=ddp")
    record, _ = run_cell(launcher, cell, tmp_path / "no_room", acts.have_no_room)
    with_room, _ = run_cell(launcher, cell, tmp_path / "room")
    assert record.losses.loss == with_room.losses.loss  # the step is taken all the same
    assert {"loss", "scale of the whole gradient"} <= with_room.objective.errors.keys()
    section = record.objective
    assert (record.status, section.parameters, section.errors) == ("ok", 0, {})
    assert re.search(r"[\d.]+ MiB on one rank and [\d.]+ [KM]iB in its host memory", section.reason)
    (check,) = [check for check in record.checks if check.what == "every gradient on the cell's engine"]
    assert (check.tokens, check.reason) == (None, section.reason)


def test_needed_bytes_of_qwen3_4b_fit_80_gb_and_fall_with_layers():
    cell = make_cell("model=qwen3_4b", "strategy=ulysses", "engine=zero3", machine=FOUR_H100)
    choices = [*coverages(cell)]
    needed = [needed_bytes(cell, 1024, coverage) for coverage in choices]
    kept = [gradient_bytes(cell, coverage) for coverage in choices]
    assert needed[0] < 18 * 2**30  # next to a quarter of the states, half of what is free of 80 GB is 30 GiB
    assert kept[0] == 4 * parameters(cell.model)
    assert needed[0] >= needed[1] > needed[2]
    assert kept[0] > kept[1] > kept[2]


def test_coverage_contains_parameters_of_its_layers():
    whole, few, layers = coverages(make_cell("model=qwen3_nano", "model.num_layers=6"))
    names = [f"model.model.layers.{n}.mlp.up_proj.weight" for n in range(6)] + ["model.lm_head.weight"]
    contained = [[name in coverage for name in names] for coverage in (whole, few, layers)]
    assert contained == [
        [True] * 7,
        [n in (0, 3, 5, 6) for n in range(7)],
        [n in (0, 3, 5) for n in range(7)],
    ]
    assert (whole.is_whole, few.is_whole, layers.is_whole) == (True, False, False)
    assert str(few) == "layers 0, 3 and 5 of 6, the embedding, the final norm and the head"
    assert [coverage.is_whole for coverage in coverages(make_cell("model=qwen3_nano"))] == [True, True, False]


DEEP = ("model=qwen3_nano", "model.num_layers=6")


@pytest.mark.parametrize(
    "words",
    [
        ("engine=zero3",),
        ("engine=fsdp2", "dtype=fp32"),
        ("engine=ddp", "model.tied_embeddings=false", "grad_accum=2"),
        ("engine=fsdp2", "trainer=accelerate", "strategy=local", "dp_shard=2", "sp_degree=1"),
    ],
)
def test_objective_compares_three_layers_if_no_more_fit(launcher, tmp_path, words):
    cell = tiny_cell("strategy=ulysses", "cluster.world_size=2", *DEEP, *words)
    record, _ = run_cell(launcher, cell, tmp_path, acts.have_room_for_three_layers)
    assert record.status == "ok", record.reason
    section, checks = record.objective, {check.what: check for check in record.checks}
    assert (section.parameters, section.compared_parameters) == (3 * 11, "layers 0, 3 and 5 of 6")
    assert section.noise == {}
    assert "scale of the compared gradients" in section.errors
    assert checks["gradients on the cell's engine of layers 0, 3 and 5 of 6"].tokens == section.tokens
    assert checks["every gradient on the cell's engine"].reason == section.left_out_reason


MIDDLE = r"the gradient of model.model.layers.3.mlp.\w+.weight is off"


@pytest.mark.parametrize(
    ("name", "dtype", "fault", "pattern"),
    [
        ("zero3", "bf16", acts.enlarge_gradients_in_the_middle_layer, MIDDLE),
        ("fsdp2", "bf16", acts.enlarge_gradients_in_the_middle_layer, MIDDLE),
        ("ddp", "bf16", acts.enlarge_gradients_in_the_middle_layer, MIDDLE),
        ("fsdp2", "fp32", engine.enlarge_gradients_a_little, "the gradient of .* is off by 7.5e-03"),
        ("zero3", "bf16", tokens.divide_by_sp_degree, ".*; gradients are exactly 1/sp_degree = 0.5"),
    ],
)
def test_objective_of_three_layers_finds_a_fault(launcher, tmp_path, name, dtype, fault, pattern):
    words = (f"engine={name}", f"dtype={dtype}", *DEEP)
    cell = tiny_cell("strategy=ulysses", "cluster.world_size=2", *words)
    record, _ = run_cell(launcher, cell, tmp_path, partial(acts.have_room_for_three_layers, fault=fault))
    assert record.status == "wrong_result"
    assert re.match(f"objective on engine={name}: {pattern}", record.reason), record.reason
