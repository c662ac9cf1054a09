import pytest

from analysis.cells.parts import step_ms
from analysis.labels import SHARED_CORES, number_label
from analysis.read.hardware import node_links
from analysis.read.views import View
from analysis.show.columns import COLUMNS, NAME
from analysis.show.page.page import render
from analysis.show.page.record import record_details
from analysis.show.section import Table
from analysis.show.sections import sections_of
from tests.support.records import CPU, TRAINING_COMPARED, as_record, make_record, make_timing, on_ranks
from tests.support.sections import findings_of, rows_by_heading

FLOPS = {
    "model_flops_causal": 10**13,
    "model_flops_full": 2 * 10**13,
    "hardware_flops_causal": 3 * 10**13,
    "hardware_flops_full": 4 * 10**13,
}
IN_FLIGHT = "exposed / in flight, worst rank"
FACTS = {
    "tokens/s per rank": "40,960",
    "tokens/s over the whole window": "81,920",
    "MFU (causal / full)": "5.0 % / 10.0 %",
    "HFU (causal / full)": "15.0 % / 20.0 %",
    "speed-up": "1.50 times local on 1 rank (cell {base})",
    "strong scaling": "1.50 times local on 1 rank (cell {base}), efficiency 75.0 %",
    "memory one rank may use": "h100_80gb: 79.6 GiB",
    f"attention communication: {IN_FLIGHT}": "6.4 % / 12.7 %",
    f"all communication: {IN_FLIGHT}": "10.0 % / 20.0 %",
    "straggler gap (ms)": "0.00",
}
BASE = make_record(config={"strategy": "local"}, timing=make_timing([[150.0] * 8]))


def details_of(cell):
    """Return the details of a cell by heading."""
    (row,) = rows_by_heading(Table.from_items(COLUMNS, [{**cell, NAME: ""}]), View.DETAILS)
    return row


@pytest.fixture
def cell(summary_of):
    """Return the cell with two ranks, from a sweep that also has `local` and four ranks."""
    own, four = make_record(analytic=FLOPS), on_ranks(["ulysses"], [8192], [4], lambda *_: 80.0)
    return summary_of([BASE, own, *four]).set_index("cell_id").loc[own["cell_id"]]


def test_details_show_metrics_without_a_table_column(cell):
    facts = details_of(cell)
    expected = {name: text.format(base=BASE["cell_id"]) for name, text in FACTS.items()}
    assert {name: facts[name] for name in FACTS} == expected


def test_details_say_that_cpu_ranks_share_cores(summary_of):
    cells = summary_of(on_ranks(["ring"], [8192], [2, 4], **CPU)).to_dict("records")
    assert all(SHARED_CORES in details_of(cell)["strong scaling"] for cell in cells)


def test_details_say_why_unknown_hardware_has_no_mfu(summary_of):
    (cell,) = summary_of([make_record(config={"hardware": "unknown"}, analytic=FLOPS)]).to_dict("records")
    assert details_of(cell)["MFU (causal / full)"].startswith("unknown: no file in conf/hardware/")
    assert "MFU (causal / full)" not in details_of({**cell, "step_time_ms": None, "mfu_causal": None})


CHECKS = [
    {"what": "attention", "against": "float64", "tokens": 8192, "rows": 32, "steps": 1},
    {**TRAINING_COMPARED, "steps": 1, "of_steps": 12, "reason": "cell abc ran 1 step"},
    {**TRAINING_COMPARED, "steps": 0, "of_steps": 12, "reason": "the first"},
    {"what": "objective", "against": "float64", "reason": "no time"},
]


@pytest.mark.parametrize(("status", "made"), [("ok", "passed"), ("wrong_result", "compared")])
def test_check_rows_show_extent_or_reason(status, made):
    """Check rows of a wrong result say compared instead of passed, because one of the checks failed."""
    table = record_details(as_record(make_record(status=status, checks=CHECKS))).checks
    assert [*table.rows] == [
        ("attention", "float64", "8,192", "32", "1", made),
        ("training signal", "another cell", "8,192", "all", "1 of 12", f"{made}; cell abc ran 1 step"),
        ("training signal", "another cell", "8,192", "all", "0 of 12", "not checked; the first"),
        ("objective", "float64", "", "", "", "not checked; no time"),
    ]
    assert [*record_details(as_record(make_record(checks=None))).checks.rows] == []


@pytest.mark.parametrize(("difference", "text"), [(0.016, "1.6e-02"), (None, "not finite")])
def test_details_name_the_gradient_nearest_to_its_limit(difference, text):
    match = {
        "parameters": 13,
        "below_noise": 0,
        "parameter": "head.weight",
        "difference": difference,
        "limit": 0.1,
    }
    record = as_record(make_record(losses={**make_record()["losses"], "gradient_match": match}))
    facts = dict(record_details(record).facts)
    expected = f"of 13 parameters head.weight is nearest to its limit, with {text} (limit 1e-01)"
    assert facts["gradients at the measured length"] == expected


def test_page_lists_checks_and_names_missing_ones(tmp_path):
    findings = findings_of(tmp_path, [make_record(checks=CHECKS)])
    page = render(findings, sections_of(findings))
    assert "<dt>tokens/s per rank</dt><dd>40,960</dd>" in page
    assert '<th scope="row">attention</th><td class="words">float64</td>' in page
    assert "In 1 of 12 steps (warm-up, timed, inspected and traced), the loss agrees with that" in page
    assert "Not checked: objective in 1 of 1 cell." in page


def test_step_parts_text_adds_up_to_the_step(cell):
    parts, _, whole = details_of(cell)["parts of the step"].rpartition(" = ")
    parts_ms = [float(part.split()[-2]) for part in parts.split(" + ")]
    assert sum(parts_ms) == pytest.approx(step_ms(cell), abs=0.01 * len(parts_ms))
    assert whole == f"{number_label(step_ms(cell))} ms"
    assert ": transfer" in parts


RATE = "attention communication rate"
NVLINKS = {"gpu_p2p": {"0-1": "NVLink"}}


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        ({}, NVLINKS, "0.90 GB/s per rank while in flight and not waiting, 0.2 % of NVLink 4 (450 GB/s)"),
        ({}, {"gpu_p2p": {"0-1": "NVLink", "0-2": "ok"}}, None),
        ({"cluster.ranks_per_gpu": 2}, NVLINKS, None),
        ({"hardware": "cpu"}, NVLINKS, None),
    ],
)
def test_attention_rate_is_compared_with_a_known_link(config, environment, expected):
    record = make_record(config=config, environment=environment)
    record["engagement"]["sent_bytes"] = {"attention": [8_100_000] * 2}  # in 14 ms, 5 of them waiting
    assert dict(record_details(as_record(record), node_links()).facts).get(RATE) == expected
