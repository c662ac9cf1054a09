"""Every formula and limit on a page about a measured quantity gives what the code gives."""

import math
import re
import statistics
from types import SimpleNamespace

import pytest

from analysis.read import notes, traced_shares
from analysis.read.metrics import QUANTITIES
from bench.common.statistics import MAX_PROCESSES, MIN_PROCESSES, TOLD_RATIO, interval_rank, pair_rank
from bench.config import DTYPE_BYTES
from bench.cost import flops
from bench.measure import calls
from bench.measure.attention import rank as attention_rank
from bench.measure.attention import rank as row_errors
from bench.measure.attention import section as attention_section
from bench.measure.full_length import section as full_length
from bench.measure.memory import live_blocks
from bench.measure.objective import gradient_noise as objective_noise
from bench.measure.objective import rank as objective
from bench.measure.objective import section as objective_section
from bench.measure.objective import step_errors
from bench.measure.parity import section as parity
from bench.measure.probe import rank as probe
from bench.measure.telemetry import rank as telemetry
from bench.measure.timing import section as timing_section
from bench.measure.trace.section import TRACED_PART, TRACED_STEPS
from bench.record.trajectory_noise import LIMITS, MOVED, NOISE_FACTOR, UNMEASURED
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import activation_bytes, backwards_per_step, forwards_per_step
from tests.support.cells import FOUR_H100, make_cell, make_raw, with_strategy
from tests.support.quantity_pages import (
    LOOKED_UP,
    PEAK_FLOPS_PER_S,
    a_record,
    formula_of,
    summary_of_one,
    text_of,
)

WORDS_OF_NUMBERS = {3: "three", 5: "five", 6: "six", 10: "ten"}
WORDS_OF_PARTS = {0.5: "half"}


@pytest.fixture(scope="module")
def summary():
    return summary_of_one()


@pytest.mark.parametrize("page", [each.page for each in QUANTITIES if formula_of(each.page)])
def test_a_formula_gives_what_the_analysis_gives(page, summary):
    record, row = a_record(), summary.iloc[0]
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
    """The names that formulas of FLOPs and bytes use."""
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
        "tiled_mlp": cell.tiled_mlp,
    }  # fmt: skip


PAYLOADS = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text_of("payload"), flags=re.MULTILINE))
"""Formulas of the page by strategy. A strategy without a row needs none: its facts say what it sends."""


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("checkpointing=true", "batch=2", "grad_accum=3", "model=qwen3_nano", "seq_len=1k"),
        ("cluster=cpu",),
    ],
)
def test_the_page_on_payload_says_what_each_strategy_exchanges(name, words):
    spread = ("seq_len=2k",) if name == "local" else LOOKED_UP
    cell = resolve(with_strategy(make_raw(*spread, *words), name), FOUR_H100)
    found = eval(PAYLOADS[name], {**cell_names(cell), "max": max})  # noqa: S307
    assert found == STRATEGIES[name].communication_bytes(cell)


@pytest.mark.parametrize("tiled_mlp", ["true", "false"])
@pytest.mark.parametrize("loss", ["untiled", "chunked"])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_the_page_on_mfu_says_how_flops_are_counted(checkpointing, loss, tiled_mlp):
    choices = "batch=2", f"checkpointing={checkpointing}", f"loss={loss}", f"tiled_mlp={tiled_mlp}"
    cell = make_cell(*LOOKED_UP, *choices, machine=FOUR_H100)
    given = {"ranks": 4, "step_time_ms": 1.0, "peak_flops_per_s": 1.0}
    found = cell_names(cell) | given
    exec(formula_of("mfu"), found)  # noqa: S102  a page of this repository
    assert found["model_flops_causal"] == flops.model_flops(cell, causal=True)
    assert found["model_flops_full"] == flops.model_flops(cell, causal=False)
    assert found["hardware_flops_causal"] == flops.hardware_flops(cell, causal=True)
    assert found["hardware_flops_full"] == flops.hardware_flops(cell, causal=False)


def test_the_page_on_samples_has_the_interval_s_rank():
    found = {"comb": math.comb}
    exec(formula_of("samples").partition("\n\n\n")[0], found)  # noqa: S102  a page of this repository
    assert [found["interval_rank"](n) for n in range(1, 200)] == [interval_rank(n) for n in range(1, 200)]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("attention_alone", f"at most {WORDS_OF_NUMBERS[attention_rank.MAX_CALLS]} calls"),
        ("attention_parity", f"up to {parity.MAX_TOKENS} tokens"),
        ("attention_parity", ", ".join(f"{factor:.0f} {name}" for name, factor in parity.FACTORS.items())),
        ("attention_parity", f"{parity.FLOORS['fp32'].forward:.0e} fp32"),
        ("attention_parity", f"{parity.FLOORS['fp16'].backward:.0e} for dq, dk and dv"),
        ("probe", f"at most {probe.CUT_VOCABULARY} words"),
        ("objective", f"{parity.FLOORS['bf16'].loss:.0e} bf16 for the loss"),
        ("objective", f"up to {objective_section.MAX_TOKENS:,} tokens"),
        ("objective", f"max(floor, {objective_noise.FACTOR:.0f} * noise(x))"),
        ("objective", f"{objective_noise.SCALE_FACTOR:.0f} * noise(scale)"),
        ("objective", f"blocks of {objective_noise.LOSS_BLOCK} rows"),
        ("objective", f"{objective.CPU_ROOM_BYTES // 2**30} GiB on a CPU"),
        ("objective", f"limit {step_errors.NORM_LIMIT:.0e}"),
        ("objective", f"{objective_noise.CHANCE:.0f} * e / sqrt(n)"),
        ("error_ulps", ", ".join(f"{x:.0f} {name}" for name, x in attention_section.ERROR_FACTORS.items())),
        ("full_length", f"Of {full_length.SAMPLED_ROWS} tokens"),
        ("full_length", f"of {full_length.SAMPLED_KEYS} more, some on each rank"),
        ("full_length", f"more than {full_length.CPU_SCORES:,} scores a rank"),
        ("full_length", f"max(floor, {full_length.CONTROL_FACTOR} * error of the control)"),
        ("full_length", ", ".join(f"{x:.0e} {dtype}" for dtype, x in full_length.GRADIENT_FLOORS.items())),
        ("full_length", ", ".join(f"{x:.0e} {dtype}" for dtype, x in full_length.KEY_FLOORS.items())),
        ("full_length", ", ".join(f"{x:.2g} {dtype}" for dtype, x in full_length.IDENTITY_LIMITS.items())),
        ("full_length", ", ".join(f"{limit:.0e} {dtype}" for dtype, limit in full_length.OUT_FLOORS.items())),
        ("training_signal", f"+ {MOVED:g} * floor * max"),
        ("training_signal", ", ".join(f"{limit.loss:.0e} {dtype}" for dtype, limit in LIMITS.items())),
        ("training_signal", ", ".join(f"{limit.grad_norm:.0e} {dtype}" for dtype, limit in LIMITS.items())),
        ("training_signal", f"max(floor, {NOISE_FACTOR:.0f} * noise)"),
        ("training_signal", f"limit of {UNMEASURED.loss:.0e} and {UNMEASURED.grad_norm:g} stands"),
        ("error_ulps", f"up to {row_errors.SAMPLED_TOKENS} tokens"),
        ("out_of_memory", f"the {WORDS_OF_NUMBERS[live_blocks.MAX_CLASSES]} classes of live blocks"),
        ("payload", f"under {calls.SMALL_BYTES:,} bytes"),
        ("peak_allocated", f"at most {timing_section.FIRST_STEP_TOKENS:,} tokens"),
        ("stability", f"more than {notes.UNSTABLE:.0%}, {notes.VERY_UNSTABLE:.0%} of the median"),
        ("stability", f"low - {notes.SEVERE_FENCE:.0f} (high - low)"),
        ("stability", f"> {notes.BUSY:.0f} * cores"),
        ("step_parts", f"{WORDS_OF_NUMBERS[TRACED_STEPS]} traced ones"),
        ("traced_to_timed", f"{WORDS_OF_NUMBERS[TRACED_STEPS].capitalize()} steps are traced"),
        ("sweep_ratio", f"{pair_rank(6, 6)} of the 36 ratios of six and six processes"),
        ("sweep_ratio", f"fewer than {WORDS_OF_NUMBERS[MIN_PROCESSES]} processes"),
        ("samples", f"`measure.repeats_budget_s` ({make_cell().measure.repeats_budget_s:.0f})"),
        ("samples", f"{MAX_PROCESSES} in all at the most"),
        ("samples", f"too far to tell {TOLD_RATIO - 1:.0%} apart"),
        ("telemetry", f"every {telemetry.PERIOD_S * 1e3:.0f} ms"),
        ("telemetry", f"{telemetry.MAX_SAMPLES:,} samples"),
        ("telemetry", f"< {telemetry.SLOW_CLOCK} * reference_clock_mhz"),
        ("telemetry", "{}, {}, {} or {}".format(*telemetry.FAULTS)),
        ("traced_to_timed", f"longer than {traced_shares.MAX_TRACED_TO_TIMED} timed"),
        ("traced_to_timed", f"less than {traced_shares.MIN_TRACED_TO_TIMED} did not"),
        ("traced_to_timed", f"more than {WORDS_OF_PARTS[TRACED_PART]} of `measure.budget_s`"),
    ],
)  # fmt: skip
def test_a_limit_on_a_page_is_the_limit_of_the_code(page, said):
    assert said.replace("%", " %").replace("e-0", "e-") in " ".join(text_of(page).split())
