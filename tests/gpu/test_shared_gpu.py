"""Results, gates, bytes and traces of every strategy on NCCL ranks that share one GPU; no speeds."""

import itertools
import json
from dataclasses import replace

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.config import MASKS
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from tests.support.attention_cases import errors_of, pairwise
from tests.support.cells import variants
from tests.support.gpus import GPU_KERNELS, NEEDS_GPU, available, gpu_cell, run_on_gpu

pytestmark = [*NEEDS_GPU]

WORLD_SIZES = (2, 4)
ROUNDING = 1.001
PARALLEL = [name for name, facts in STRATEGIES.items() if facts.shares_sequences]
ENGINES = sorted(ENGINE_FACTS)
QUICK = ("seq_len=1k", "measure.steps=2", "measure.warmup_steps=1")
MANY_CASES = ("engine=ddp", "seq_len=512", "measure.timeout_s=400")
MESHES = ("dp_shard=2 sp_degree=2", "dp_replicate=2 sp_degree=2")


def cells():
    """Return all pairs of strategy and engine on 2 ranks, all strategies on 4 ranks, and all meshes."""
    on_four = zip(PARALLEL, itertools.cycle(ENGINES), strict=False)
    return [
        *((strategy, engine, 2, "") for strategy, engine in itertools.product(PARALLEL, ENGINES)),
        *((strategy, engine, 4, "") for strategy, engine in on_four),
        *((strategy, "fsdp2", 4, mesh) for strategy, mesh in zip(("ulysses", "ring"), MESHES, strict=True)),
    ]


@pytest.fixture(scope="module", params=cells(), ids=lambda case: "-".join(map(str, filter(None, case))))
def record(request, launcher, tmp_path_factory, strangers):  # counted from before the first cell
    """Return the record of a cell, which runs once for all tests below."""
    strategy, engine, ranks, mesh = request.param
    cell = gpu_cell(*QUICK, f"strategy={strategy}", f"engine={engine}", *mesh.split(), ranks=ranks)
    return run_on_gpu(launcher, cell, tmp_path_factory.mktemp("cell"))


def test_cell_passes_its_gates_and_sends_the_formula_bytes(record, strangers):
    assert record.status == "ok", f"{record.reason}\n{record.failure and record.failure.log_tail}"
    ranks = record.config["cluster.world_size"]
    assert record.config["cluster.ranks_per_gpu"] == ranks
    assert {"out", "dq", "dk", "dv"} <= record.parity.errors.keys()
    assert record.losses.tokens_digest == record.losses.expected_digest
    sent, facts = record.engagement.sent_bytes["attention"], STRATEGIES[record.config["strategy"]]
    assert max(sent) == record.analytic.attention_bytes
    assert facts.sends_unevenly or len({*sent}) == 1
    assert record.telemetry.other_processes in (None, [strangers] * ranks)


def test_traced_step_adds_up_and_all_purposes_are_known(record):
    assert record.status == "ok", record.reason
    trace, ranks = record.trace, record.config["cluster.world_size"]
    assert trace.purposes_unknown == [None] * ranks
    assert trace.waiting_unknown is None
    for rank, step_ms in enumerate(trace.step_ms):
        total_ms = sum(times[rank] for times in trace.compute_ms.values()) + trace.idle_ms[rank]
        total_ms += sum(times[rank] for times in trace.purpose_exposed_ms.values())
        total_ms += sum(times[rank] for times in trace.copies_ms.values())
        assert total_ms == pytest.approx(step_ms, rel=0.02)
        assert trace.exposed_ms[rank] / ROUNDING <= trace.total_ms[rank] <= step_ms * ROUNDING
        assert trace.compute_ms["attention"][rank] > 0
        assert trace.compute_ms["optimizer"][rank] > 0
        assert trace.purpose_total_ms["attention"][rank] > 0


def attention_cases(ranks):
    """Return legal cells by strategy, layout, options, kernel, dtype and mask."""
    cells_by_case = {}
    for strategy in PARALLEL:
        facts = STRATEGIES[strategy]
        for (layout, options), kernel in itertools.product(variants(facts), GPU_KERNELS):
            for dtype in KERNEL_FACTS[kernel].dtypes["cuda"]:
                words = [f"strategy={strategy}", f"layout={layout}", f"kernel={kernel}", f"dtype={dtype}"]
                words += [f"strategy.{key}={value}" for key, value in options]
                cell = gpu_cell(*words, *MANY_CASES, ranks=ranks)
                if available(kernel, "cuda") and refusal(cell) is None:
                    for mask in MASKS:
                        if not facts.mask_refusals(replace(cell, workload=replace(cell.workload, mask=mask))):
                            cells_by_case[strategy, layout, options, kernel, dtype, mask] = cell
    return cells_by_case


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_attention_matches_float64_in_all_layouts_and_dtypes(launcher, tmp_path, ranks):
    cells_by_case = attention_cases(ranks)
    cases = {case: cells_by_case[case] for case in pairwise({case: case for case in cells_by_case})}
    errors = errors_of(launcher, tmp_path, cases)
    limits = json.loads((tmp_path / "limits.json").read_text())
    wrong = {
        case: {name: (error, limit[name]) for name, error in found.items() if error > limit[name]}
        for (case, found), limit in zip(errors.items(), limits, strict=True)
    }
    assert {case: found for case, found in wrong.items() if found} == {}


@pytest.mark.parametrize("strategy", PARALLEL)
def test_attention_workload_errs_no_more_than_its_kernel(launcher, tmp_path, strategy):
    words = ("workload=attention", "seq_len=2k", "measure.steps=2", "measure.warmup_steps=1")
    record = run_on_gpu(launcher, gpu_cell(*words, f"strategy={strategy}", ranks=2), tmp_path)
    assert record.status == "ok", record.reason
    calls = record.attention
    for name, error in calls.error_ulps.items():
        assert 0 < error <= 2 * calls.control_error_ulps[name] + 1
