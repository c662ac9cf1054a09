"""The formulas and limits in docs/quantities are those of the code."""

import math
import re
import statistics
from types import SimpleNamespace

import pytest

from analysis.read import notes, traced_shares
from analysis.read import quantities as q
from analysis.read.metrics import QUANTITIES
from bench.common.statistics import DETECTABLE_RATIO, MAX_PROCESSES, MIN_PROCESSES, interval_rank, pair_rank
from bench.config import DTYPE_BYTES
from bench.cost import flops
from bench.measure import calls
from bench.measure.attention import rank as attention_rank
from bench.measure.attention import rank as row_errors
from bench.measure.attention import section as attention_section
from bench.measure.full_length import section as full_length
from bench.measure.losses import section as losses_section
from bench.measure.memory import live_blocks
from bench.measure.objective import gradient_noise as objective_noise
from bench.measure.objective import rank as objective
from bench.measure.objective import section as objective_section
from bench.measure.objective import step_errors
from bench.measure.parity import section as parity
from bench.measure.telemetry import rank as telemetry
from bench.measure.timing import section as timing_section
from bench.measure.trace.section import TRACED_PART, TRACED_STEPS
from bench.record import gradient_agreement as agreement
from bench.record.trajectory_noise import LIMIT_WITHOUT_NOISE, LIMITS, MOVEMENT_WEIGHT, NOISE_FACTOR
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import activation_bytes, backwards_per_step, forwards_per_step
from tests.support.cells import FOUR_H100, make_cell, make_raw, with_strategy
from tests.support.quantity_pages import (
    LOOKED_UP,
    PEAK_FLOPS_PER_S,
    distinct_record,
    formula_of,
    summary_of_one,
    text_of,
)

WORDS_OF_NUMBERS = {3: "three", 5: "five", 6: "six", 10: "ten"}
WORDS_OF_PARTS = {0.5: "half"}


@pytest.fixture(scope="module")
def summary():
    return summary_of_one()


@pytest.mark.parametrize("page", [quantity.page for quantity in QUANTITIES if formula_of(quantity.page)])
def test_a_formula_gives_the_columns_of_the_summary(page, summary):
    record, row = distinct_record(), summary.iloc[0]
    found = {
        **{name: SimpleNamespace(**value) for name, value in record.items() if isinstance(value, dict)},
        **cell_names(make_cell(*LOOKED_UP, machine=FOUR_H100)),
        "config": record["config"],
        "ranks": record["config"]["cluster.world_size"],
        "step_time_ms": row["step_time_ms"],
        "peak_flops_per_s": PEAK_FLOPS_PER_S,
        "median": statistics.median,
        "comb": math.comb,
    }
    given = {*found}
    exec(formula_of(page), found)  # noqa: S102  a page of this repository
    columns = {*summary.columns} & {*found} - given
    assert columns
    assert {name: found[name] for name in columns} == pytest.approx({name: row[name] for name in columns})


def cell_names(cell):
    """Return the names that formulas of FLOPs and bytes use."""
    model = cell.model
    return {
        "S": cell.seq_len, "P": cell.sp_degree, "U": cell.ulysses_degree, "R": cell.ring_degree,
        "F": forwards_per_step(cell), "B": backwards_per_step(cell),
        "A": lambda heads: activation_bytes(cell, heads),
        "wide": max(4, DTYPE_BYTES[cell.dtype]) // DTYPE_BYTES[cell.dtype],
        "gloo": cell.cluster.backend == "gloo",
        "batch": cell.batch, "shard_len": cell.shard_len, "sequences": cell.sequences_per_step,
        "layers": model.num_layers, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "hidden": model.hidden_size, "vocab": model.vocab_size,
        "intermediate": model.intermediate_size, "checkpointing": cell.checkpointing, "loss": cell.loss,
        "tiled_mlp": cell.tiled_mlp, "engine": cell.engine.name, "rows": cell.batch * cell.shard_len,
    }  # fmt: skip


PAYLOADS = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text_of(q.PAYLOAD.page), flags=re.MULTILINE))
"""Formulas by strategy; a strategy may have no row, as its facts have the formula."""


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("checkpointing=true", "batch=2", "grad_accum=3", "model=qwen3_nano", "seq_len=1k"),
        ("cluster=cpu",),
    ],
)
def test_payload_formula_is_the_strategys(name, words):
    spread = ("seq_len=2k",) if name == "local" else LOOKED_UP
    cell = resolve(with_strategy(make_raw(*spread, *words), name), FOUR_H100)
    found = eval(PAYLOADS[name], {**cell_names(cell), "max": max})  # noqa: S307
    assert found == STRATEGIES[name].communication_bytes(cell)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
@pytest.mark.parametrize("tiled_mlp", ["true", "false"])
@pytest.mark.parametrize("loss", ["untiled", "chunked"])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_mfu_formula_counts_the_codes_flops(checkpointing, loss, tiled_mlp, engine):
    words = {"checkpointing": checkpointing, "loss": loss, "tiled_mlp": tiled_mlp, "engine": engine}
    choices = "batch=2", *(f"{key}={value}" for key, value in words.items())
    cell = make_cell(*LOOKED_UP, *choices, machine=FOUR_H100)
    given = {"ranks": 4, "step_time_ms": 1.0, "peak_flops_per_s": 1.0}
    found = cell_names(cell) | given
    exec(formula_of(q.MFU.page), found)  # noqa: S102  a page of this repository
    assert found["model_flops_causal"] == flops.model_flops(cell, causal=True)
    assert found["model_flops_full"] == flops.model_flops(cell, causal=False)
    assert found["hardware_flops_causal"] == flops.hardware_flops(cell, causal=True)
    assert found["hardware_flops_full"] == flops.hardware_flops(cell, causal=False)


def test_samples_formula_has_the_interval_rank():
    found = {"comb": math.comb}
    exec(formula_of(q.SAMPLES.page).partition("\n\n\n")[0], found)  # noqa: S102  a page of this repository
    assert [found["interval_rank"](n) for n in range(1, 200)] == [interval_rank(n) for n in range(1, 200)]


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (q.ATTENTION_ALONE, f"at most {WORDS_OF_NUMBERS[attention_rank.MAX_CALLS]} calls"),
        (q.ATTENTION_PARITY, f"up to {parity.MAX_TOKENS} tokens"),
        (q.ATTENTION_PARITY, ", ".join(f"{factor:.0f} {name}" for name, factor in parity.FACTORS.items())),
        (q.ATTENTION_PARITY, f"{parity.FLOORS['fp32'].forward:.0e} fp32"),
        (q.ATTENTION_PARITY, f"{parity.FLOORS['fp16'].backward:.0e} for dq, dk and dv"),
        (q.OBJECTIVE, f"{parity.FLOORS['bf16'].loss:.0e} bf16 for the loss"),
        (q.OBJECTIVE, f"up to {objective_section.MAX_TOKENS:,} tokens"),
        (q.OBJECTIVE, f"max(floor, {objective_noise.FACTOR:.0f} * noise(x))"),
        (q.OBJECTIVE, f"{objective_noise.FACTOR:.0f} * noise(scale)"),
        (q.OBJECTIVE, f"{objective_noise.ALONG_FACTOR} * noise(gradient)"),
        (q.OBJECTIVE, f"{objective_noise.WHOLE_FACTOR:.0f} * noise(whole)"),
        (q.OBJECTIVE, f"blocks of {objective_noise.LOSS_BLOCK} rows"),
        (q.OBJECTIVE, f"{objective.CPU_ROOM_BYTES // 2**30} GiB on a CPU"),
        (q.OBJECTIVE, f"limit {step_errors.NORM_LIMIT:.0e}"),
        (q.OBJECTIVE, f"{objective_noise.CHANCE:.0f} * e / sqrt(n)"),
        (q.ERROR_ULPS, ", ".join(f"{x:.0f} {name}" for name, x in attention_section.ERROR_FACTORS.items())),
        (q.FULL_LENGTH, f"of {full_length.SAMPLED_ROWS} tokens"),
        (q.FULL_LENGTH, f"of {full_length.SAMPLED_KEYS} more tokens, some on each rank"),
        (q.FULL_LENGTH, f"more than {full_length.CPU_SCORES:,} scores a rank"),
        (q.FULL_LENGTH, f"max(floor, {full_length.CONTROL_FACTOR} * error of the control)"),
        (q.FULL_LENGTH, ", ".join(f"{x:.0e} {dtype}" for dtype, x in full_length.GRADIENT_FLOORS.items())),
        (q.FULL_LENGTH, ", ".join(f"{x:.0e} {dtype}" for dtype, x in full_length.KEY_FLOORS.items())),
        (q.FULL_LENGTH, ", ".join(f"{x:.2g} {dtype}" for dtype, x in full_length.IDENTITY_LIMITS.items())),
        (q.FULL_LENGTH, ", ".join(f"{limit:.0e} {dtype}" for dtype, limit in full_length.OUT_FLOORS.items())),
        (q.TRAINING_SIGNAL, f"+ {MOVEMENT_WEIGHT:g} * floor * max"),
        (q.TRAINING_SIGNAL, ", ".join(f"{limit.loss:.0e} {dtype}" for dtype, limit in LIMITS.items())),
        (q.TRAINING_SIGNAL, ", ".join(f"{limit.grad_norm:.0e} {dtype}" for dtype, limit in LIMITS.items())),
        (q.TRAINING_SIGNAL, f"max(floor, {NOISE_FACTOR:.0f} * noise)"),
        (
            q.TRAINING_SIGNAL,
            f"limit of {LIMIT_WITHOUT_NOISE.loss:.0e} and {LIMIT_WITHOUT_NOISE.grad_norm:g} stands",
        ),
        (q.GRADIENTS, f"max(floor, {agreement.NOISE_FACTOR:.0f} * noise)"),
        (q.GRADIENTS, f"without it {agreement.LIMIT_WITHOUT_NOISE:g} in 16 bit"),
        (q.GRADIENTS, ", ".join(f"{floor:g} {dtype}" for dtype, floor in agreement.FLOORS.items())),
        (q.GRADIENTS, f"2^{math.log2(agreement.SMALLEST_SHARE):.0f} * norm of all gradients'"),
        (q.GRADIENTS, f"If the limit of a parameter is {losses_section.ONE_RANK_EFFECT:.0%} or more"),
        (q.ERROR_ULPS, f"up to {row_errors.SAMPLED_TOKENS} tokens"),
        (q.OUT_OF_MEMORY, f"the {WORDS_OF_NUMBERS[live_blocks.MAX_CLASSES]} classes of live blocks"),
        (q.PAYLOAD, f"under {calls.SMALL_BYTES:,} bytes"),
        (q.PEAK_ALLOCATED, f"at most {timing_section.FIRST_STEP_TOKENS:,} tokens"),
        (q.STABILITY, f"more than {notes.UNSTABLE:.0%}, {notes.VERY_UNSTABLE:.0%} of the median"),
        (q.STABILITY, f"low - {notes.SEVERE_FENCE:.0f} (high - low)"),
        (q.STABILITY, f"> {notes.BUSY:.0f} * cores"),
        (q.STEP_PARTS, f"{WORDS_OF_NUMBERS[TRACED_STEPS]} traced ones"),
        (q.TRACED_TO_TIMED, f"{WORDS_OF_NUMBERS[TRACED_STEPS].capitalize()} steps are traced"),
        (q.SPEED_RATIO, f"{pair_rank(6, 6)} of the 36 ratios of six and six processes"),
        (q.SPEED_RATIO, f"fewer than {WORDS_OF_NUMBERS[MIN_PROCESSES]} processes"),
        (q.SAMPLES, f"`measure.repeats_budget_s` ({make_cell().measure.repeats_budget_s:.0f})"),
        (q.SAMPLES, f"at most {MAX_PROCESSES} processes of each cell"),
        (q.SAMPLES, f"too far to detect a difference of {DETECTABLE_RATIO - 1:.0%}"),
        (q.TELEMETRY, f"every {telemetry.PERIOD_S * 1e3:.0f} ms"),
        (q.TELEMETRY, f"{telemetry.MAX_SAMPLES:,} samples"),
        (q.TELEMETRY, f"< {telemetry.SLOW_CLOCK} * reference_clock_mhz"),
        (q.TELEMETRY, "{}, {}, {} or {}".format(*telemetry.FAULT_EVENTS)),
        (q.TRACED_TO_TIMED, f"longer than {traced_shares.MAX_TRACED_TO_TIMED} timed"),
        (q.TRACED_TO_TIMED, f"less than {traced_shares.MIN_TRACED_TO_TIMED} did not"),
        (q.TRACED_TO_TIMED, f"more than {WORDS_OF_PARTS[TRACED_PART]} of `measure.budget_s`"),
    ],
)  # fmt: skip
def test_a_limit_in_a_section_is_that_of_the_code(quantity, text):
    assert text.replace("%", " %").replace("e-0", "e-") in " ".join(text_of(quantity.page).split())
