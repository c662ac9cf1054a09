"""Every pass lists its checks of a cell: the compared quantity, its extent, or why it was not compared."""

import dataclasses
import math
from functools import partial

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from bench.config import USER_CODE
from bench.measure import PASSES, checks, first_failure
from bench.measure.engagement.section import NOT_RECORDED, EngagementSection
from bench.measure.facts import PassFacts, nearest_to_limit
from bench.measure.full_length.section import FullLengthSection
from bench.measure.losses.section import NO_REFERENCE, LossesSection
from bench.measure.objective.section import ObjectiveSection
from bench.measure.parity.section import ParitySection
from bench.measure.timing.section import FASTEST_STEP, TimingSection, least_flops
from bench.measure.trace.section import TraceSection
from bench.record.record import Check
from bench.strategies import STRATEGIES
from tests.support.cells import make_cell

CELL = make_cell("strategy=ulysses", "seq_len=4k", "cluster.world_size=2")
ALONE = make_cell("strategy=ulysses", "seq_len=4k", "cluster.world_size=2", "workload=attention")
NOTHING = dict.fromkeys(PASSES)
ROWS, STEP = partial(FullLengthSection, rows=32), partial(ObjectiveSection, sequences=1)
LOSSES = LossesSection(
    loss=[5.0] * 14,
    loss_sums=[[20.0] * 14],
    grad_norm=[1.0] * 14,
    valid_tokens=[4] * 14,
    tokens_digest=["a"] * 14,
    expected_digest=["a"] * 14,
)


def checks_of(name, section, cell=CELL):
    """Return the checks of one pass by the compared quantity."""
    return {check.what: check for check in PASSES[name].checks(cell, section)}


def trace_section(**fields):
    return TraceSection(step_ms=[1.0] * 2, total_ms=[0.0] * 2, exposed_ms=[0.0] * 2, **fields)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        (
            ParitySection,
            0.5,
            "attention parity: dq at 512 tokens is off by 5.0e-01 of its maximum",
        ),
        (ParitySection, math.nan, "attention parity: dq at 512 tokens is not finite"),
        (ROWS, 0.5, "attention at 512 tokens: dq of the sampled rows is off by 5.0e-01"),
        (ROWS, math.inf, "attention at 512 tokens: dq is not finite"),
        (STEP, 0.5, "objective on engine=fsdp2: the dq is off by 5.0e-01 at 512 tokens"),
        (partial(STEP, cause="a cause"), math.nan,
         "objective on engine=fsdp2: the dq is missing or not finite at 512 tokens; a cause"),
    ],
)  # fmt: skip
def test_error_gate_names_the_first_error_beyond_its_limit(section, error, message):
    limits = {"out": 0.1, "dq": 0.25, "dk": 0.1}
    wrong = section(tokens=512, errors={"out": 0.1, "dq": error, "dk": 1.0}, limits=limits)
    sections = {facts.name: wrong for facts in PASSES.values() if facts.part_type is type(wrong)}
    assert first_failure(CELL, sections) == message + (" (limit 2.5e-01)" if error == 0.5 else "")
    assert first_failure(CELL, {name: replace(wrong, errors=limits) for name in sections}) is None


@pytest.mark.parametrize(
    ("compared", "nearest"),
    [
        ({"a": (1.0, 4.0), "b": (0.1, 0.2), "c": (0.0, 1.0)}, "b"),
        ({"a": (9.0, 10.0), "b": (1e-9, 0.0)}, "b"),
        ({"a": (9.0, 1.0), "b": (math.nan, 1.0)}, "b"),
    ],
)
def test_nearest_to_limit_puts_errors_that_are_not_finite_first(compared, nearest):
    assert nearest_to_limit(compared) == nearest


@pytest.mark.parametrize("name", PASSES)
def test_pass_with_a_gate_lists_missing_checks_with_a_reason(name):
    has_gate = type(PASSES[name]).gate is not PassFacts.gate
    scored = dataclasses.replace(CELL, experiment="quality")  # whose pass runs in no other experiment
    missing = [*PASSES[name].checks(scored, None), *PASSES[name].checks(ALONE, None)]
    assert bool(missing) == has_gate
    assert all(check.reason for check in missing)
    assert {(check.tokens, check.rows, check.steps, check.of_steps) for check in missing} <= {(None,) * 4}


def test_checks_have_unique_names_and_suit_the_workload():
    names = [[check.what for check in checks(cell, NOTHING)] for cell in (ALONE, CELL)]
    alone, training = map(set, names)
    assert [len(alone), len(training)] == [*map(len, names)]
    assert training - alone == {
        "every shard of the parameters", "every gradient on the cell's engine", "rotary positions",
        "tokens", "losses and gradient norms", "training signal", "every gradient at full length",
        "gradients of the first steps", "loss by position",
    }  # fmt: skip
    assert alone - training == {"results of a timed call", "sampled rows of a timed call"}


@pytest.mark.parametrize(
    ("fields", "steps", "against", "reason"),
    [
        ({}, 0, "another cell", NO_REFERENCE),
        ({"compared_with": "abc", "compared_steps": 14}, 14, "cell abc", None),
        ({"compared_with": "abc", "compared_steps": 12}, 12, "cell abc", "the first 12 steps are compared"),
    ],
)
def test_losses_check_counts_the_steps_that_a_reference_covers(fields, steps, against, reason):
    by_name = checks_of("losses", replace(LOSSES, **fields))
    assert to_builtins(by_name["training signal"]) == {
        "what": "training signal", "against": against, "tokens": 4096, "rows": None, "steps": steps,
        "of_steps": 14, "compares_training": True, "reason": reason, "below_noise": None,
    }  # fmt: skip
    tokens = by_name["tokens"]
    assert (tokens.steps, tokens.of_steps, tokens.compares_training) == (14, 14, False)


def test_full_length_checks_state_rows_and_keys_or_a_reason():
    section = FullLengthSection(tokens=4096, rows=32, keys=16, errors={"out": 0.0}, limits={"out": 1.0})

    def extents(**fields):
        full_length_checks = PASSES["full_length"].checks(CELL, replace(section, **fields))
        return [(check.tokens, check.rows, check.steps, check.reason) for check in full_length_checks]

    assert extents() == [(4096, 32, 1, None), (4096, 16, 1, None)]
    assert extents(keys=0, keys_reason="too long") == [(4096, 32, 1, None), (None, None, None, "too long")]
    assert extents(rows=0, keys=0, reason="no gradients") == [(None, None, None, "no gradients")] * 2


def test_parity_section_without_errors_is_a_missing_check():
    (check,) = PASSES["parity"].checks(make_cell(), ParitySection(tokens=0, errors={}, limits={}))
    assert check.reason == "its pass did not run"


def test_parity_check_names_the_other_cell_that_was_checked():
    section = ParitySection(checked_cell="abc", tokens=512, errors={"out": 0.0}, limits={"out": 1.0})
    of_other_cell = checks_of("parity", section)
    assert of_other_cell["attention"] == Check(what="attention", against="float64, in cell abc", tokens=512)
    of_cell = checks_of("parity", replace(section, checked_cell=CELL.cell_id))
    assert [(check.against, check.reason) for check in of_cell.values()] == [("float64", None)]


FLASH, CUDNN = (f"aten::_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn"))
UNTRACED = dataclasses.replace(CELL, measure=dataclasses.replace(CELL.measure, trace=False))


@pytest.mark.parametrize(
    ("section", "cell", "reason", "message"),
    [
        (trace_section(torch_attention=[FLASH]), CELL, None, None),
        (
            trace_section(torch_attention=[CUDNN, FLASH]),
            CELL,
            None,
            f"the traced step ran {CUDNN}, not",
        ),
        (trace_section(torch_attention=[]), CELL, "shows no operator of kernel=torch_flash", None),
        (TraceSection(failure="no file"), CELL, "no file", None),
        (None, UNTRACED, "measure.trace=false", None),
    ],
)
def test_attention_kernel_is_compared_with_the_traced_operators(section, cell, reason, message):
    check = checks_of("trace", section, cell)["attention kernel"]
    assert (reason or "") in (check.reason or "")
    assert (check.reason is None) is (reason is None)
    found = section and PASSES["trace"].gate(cell, section)
    assert (message or "") in (found or "")
    assert (found is None) is (message is None)


def test_kernel_of_an_own_loop_is_the_users_choice():
    section, cell = trace_section(torch_attention=[CUDNN]), dataclasses.replace(CELL, trainer=USER_CODE)
    assert "attention kernel" not in checks_of("trace", section, cell)
    assert PASSES["trace"].gate(cell, section) is None


ENGAGEMENT = EngagementSection(
    attention_name="bench_attention",
    modules=[],
    attention_shapes=[[[2048, CELL.model.num_heads, CELL.model.num_kv_heads]]] * 2,
    sent_bytes={"attention": [STRATEGIES["ulysses"].communication_bytes(CELL)] * 2},
    calls={"attention all_to_all": 4},
    compared_steps=[20, 18],
    call_differences=[None, None],
)
DIFFERS = "timed step 3 has 0 calls of all_to_all, and the inspected step has 4"


@pytest.mark.parametrize(
    ("fields", "trainer", "wrong", "steps", "reason"),
    [
        ({}, "native", None, 18, None),
        ({"call_differences": [None, DIFFERS]}, "native", f"rank 1: {DIFFERS}; ", 18, None),
        ({"call_differences": [None, DIFFERS]}, USER_CODE, None, None, None),
        ({"compared_steps": [0, 20]}, "native", None, None, NOT_RECORDED),
    ],
)
def test_timed_steps_have_the_calls_of_the_inspected_step(fields, trainer, wrong, steps, reason):
    section, cell = replace(ENGAGEMENT, **fields), dataclasses.replace(CELL, trainer=trainer)
    message = PASSES["engagement"].gate(cell, section)
    assert (message or "").startswith(wrong or "")
    assert (message is None) == (wrong is None)
    check = checks_of("engagement", section, cell).get("attention's calls in timed steps")
    assert (check and (check.steps, check.reason)) == (None if trainer == USER_CODE else (steps, reason))
    local = dataclasses.replace(cell, strategy="local", sp_degree=1)
    assert "attention's calls in timed steps" not in checks_of("engagement", section, local)


@pytest.mark.parametrize("words", [(), ("workload=attention",), ("data.packing=documents", "strategy=ring")])
def test_a_step_faster_than_matrix_products_is_wrong(words):
    cell = make_cell("strategy=ulysses", "seq_len=4k", "cluster.world_size=2", *words)
    step_ms = least_flops(cell) / cell.cluster.world_size / (FASTEST_STEP * 1e9) * 1e3

    def gate(factor, products=(1e9, 0.5e9)):
        section = TimingSection(
            step_times_ms=[[step_ms * factor]] * 2, window_ms=[step_ms] * 2, warmup="full",
            tokens_per_step=4096, product_flops_per_s=products and [*products],
        )  # fmt: skip
        return PASSES["timing"].gate(cell, section)

    assert gate(1.01) is None
    assert gate(0.99).startswith("timing: faster than the device")
    assert gate(0.99, products=None) is None


def test_engagement_check_needs_a_formula_of_the_strategy():
    unknown = checks_of("engagement", ENGAGEMENT, dataclasses.replace(CELL, strategy=USER_CODE))
    (reason,) = {check.reason for check in unknown.values()}
    assert "formula" in reason
    assert "strategy own" in reason
    assert [check.steps for check in checks_of("engagement", ENGAGEMENT).values()] == [1, 1, 18]
