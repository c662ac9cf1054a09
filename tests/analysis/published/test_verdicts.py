import json
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from analysis.frame.load import frame_of
from analysis.published.by_model import against_band
from analysis.published.claimed import claimed_range
from analysis.published.comparable import Comparable
from analysis.published.model import CostModel
from analysis.published.opinion import Verdict
from analysis.published.registry import Registry, read_registry
from analysis.published.verdicts import judged
from bench.cost.band import Band
from bench.environment import REPOSITORY
from bench.labels import GIB
from tests.analysis.records import frame_of_records, make_timing

EXPECTED = yaml.safe_load((Path(__file__).parent / "expected.yaml").read_text())
REGISTRY = read_registry()
HF_64K, HF_96K_FITS, HF_MEMORY = (
    "hf-ulysses-revB-tput-sp4-64k",
    "hf-ulysses-fits-96k",
    "hf-ulysses-mem-sp4-64k",
)
HF_LONGEST, HF_SPEEDUP = "hf-ulysses-max-seq-sp4", "hf-ulysses-revB-speedup-64k"
SET_UP = {
    "model": "qwen3_4b", "hardware": "h100_80gb", "cluster": "gpu", "cluster.device": "cuda",
    "cluster.world_size": 4, "cluster.ranks_per_gpu": 1, "strategy": "deepspeed_ulysses", "sp_degree": 4,
    "ulysses_degree": 4, "dp_shard": 1, "seq_len": 65536, "batch": 1, "grad_accum": 8, "dtype": "bf16",
    "engine": "zero3", "checkpointing": True, "loss": "untiled", "tiled_mlp": False, "kernel": "flash_attn_2",
    "offload.activations": False, "offload.optimizer": False, "workload": "train",
}  # fmt: skip
"""The post's, as its numbers speak for."""
NO_RECORDS = Comparable.of(frame_of([]))
SP4_TOKENS = 8 * 65536


@pytest.fixture(scope="module")
def by_model():
    """Every claim's judgement without any records."""
    return {each.claim.id: each for each in judged(REGISTRY, CostModel(), NO_RECORDS)}


@pytest.fixture(scope="module")
def real_record():
    """A cell that ran on CPU ranks, as this project's reference results have it."""
    lines = (REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return next(each for each in records if each["status"] == "ok" and each["config"]["strategy"] != "local")


FEW = (HF_64K, HF_96K_FITS, HF_MEMORY, HF_LONGEST, HF_SPEEDUP)


@pytest.fixture
def judged_with(real_record, tmp_path):
    """Judgements beside records like the real one, as if they had run elsewhere with other settings."""

    def judge(*changes):
        records = [_changed(real_record, **change) for change in changes]
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        measured = Comparable.of(frame_of_records(folder, records))
        found = judged(REGISTRY, CostModel(), measured, lambda claim: claim.id in FEW)
        return {each.claim.id: each for each in found}

    return judge


def _changed(
    record, *, seconds=None, gib=None, device_gib=0, config=None, device="NVIDIA H100 80GB HBM3", **fields
):
    settings = {**record["config"], **SET_UP, **(config or {})}
    changed = {
        **record,
        "config": settings,
        "cell_id": f"{hash(json.dumps(settings)):x}"[-12:],
        "role": "cell",
        **fields,
    }
    changed["environment"] = {**record["environment"], "device_name": device}
    tokens = settings["seq_len"] * settings["grad_accum"]
    if seconds is not None:
        changed["timing"] = make_timing([[1e3 * seconds] * 8] * 4, tokens)
    if gib is not None:
        held = {"device_used_bytes": [device_gib * GIB] * 4} if device_gib else {}
        changed["memory"] = {**record["memory"], "peak_allocated_bytes": [round(gib * GIB)] * 4, **held}
    return changed


AS_CLAIMED_S = SP4_TOKENS / 13396


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda each: each["id"])
def test_a_claim_is_called_what_was_decided_by_hand(by_model, expected):
    found = by_model[expected["id"]]
    assert found.verdict == expected["verdict"], found.why
    told = f"{found.why} {' '.join(map(str, found.differences))}"
    assert all(name in told for name in expected.get("names", ()))


def test_without_records_nothing_is_reproduced_and_every_claim_has_a_reason(by_model):
    assert len(by_model) == len(REGISTRY.claims)
    assert not any(each.verdict.is_by_records for each in by_model.values())
    assert all(each.why for each in by_model.values())
    others = (each for each in by_model.values() if each.verdict is Verdict.NOT_COMPARABLE)
    assert all(any(difference.is_decisive for difference in each.differences) for each in others)
    by_model_alone = {each.verdict for each in by_model.values()}
    assert by_model_alone == {verdict for verdict in Verdict if not verdict.is_by_records}


def test_a_measured_record_of_the_set_up_decides(judged_with, by_model):
    assert not by_model[HF_64K].verdict.is_by_records
    assert judged_with({"seconds": AS_CLAIMED_S * 1.05, "gib": 50.0})[HF_64K].verdict is Verdict.AS_PUBLISHED
    found = judged_with({"seconds": AS_CLAIMED_S * 1.5, "gib": 31.0})
    assert found[HF_64K].verdict is Verdict.SLOWER
    assert found[HF_MEMORY].verdict is Verdict.LESS_MEMORY
    assert "8,931 tokens/s" in found[HF_64K].why
    held = judged_with({"gib": 45.0, "device_gib": 49.0})[HF_MEMORY]
    assert held.verdict is Verdict.AS_PUBLISHED
    assert "measured 45.0 to 49.0 GiB in 1 process" in held.why
    assert judged_with({"seconds": AS_CLAIMED_S * 1.15})[HF_64K].verdict is Verdict.UNDECIDED
    by_ours = judged_with({"seconds": AS_CLAIMED_S, "config": {"strategy": "ulysses"}})
    assert by_ours[HF_64K].verdict is Verdict.AS_PUBLISHED


NOT_OF_THE_SET_UP = {
    "another length": {"config": {"seq_len": 32768}},
    "another strategy": {"config": {"strategy": "ring"}},
    "another loss": {"config": {"loss": "chunked"}},
    "shared GPUs": {"config": {"cluster.ranks_per_gpu": 2}},
    "a memory limit": {"config": {"cluster.memory_limit_gib": 40.0}},
    "a mistake": {"config": {"mistake": "mask_off_by_one"}},
    "a control": {"role": "control"},
    "a CPU named an H100": {"device": "a processor"},
    "predicted": {"provenance": "predicted"},
}


def test_no_other_record_decides(judged_with):
    others = [{"seconds": AS_CLAIMED_S, **change} for change in NOT_OF_THE_SET_UP.values()]
    found = judged_with(*others)[HF_64K]
    assert not found.verdict.is_by_records, found.why
    assert judged_with(*others, {"seconds": AS_CLAIMED_S})[HF_64K].verdict is Verdict.AS_PUBLISHED


def test_memory_that_ran_out_decides_what_fits_and_the_longest_length(judged_with):
    at_96k = {"config": {"seq_len": 98304}}
    found = judged_with(at_96k)
    assert [found[name].verdict for name in (HF_96K_FITS, HF_LONGEST)] == [Verdict.AS_PUBLISHED] * 2
    failed = {"status": "out_of_memory", "reason": "CUDA out of memory", "timing": None, "memory": None}
    found = judged_with(at_96k | failed)
    assert found[HF_96K_FITS].verdict is Verdict.RAN_OUT
    assert found[HF_LONGEST].verdict is Verdict.CONTRADICTED


def test_a_ratio_is_decided_by_records_of_both_its_cells(judged_with):
    base = {
        "config": {"strategy": "local", "cluster.world_size": 1, "sp_degree": 1, "seq_len": 8192},
        "seconds": 8 * 8192 / 3633,
    }
    assert not judged_with({"seconds": AS_CLAIMED_S})[HF_SPEEDUP].verdict.is_by_records
    assert judged_with({"seconds": AS_CLAIMED_S}, base)[HF_SPEEDUP].verdict is Verdict.AS_PUBLISHED


def test_what_its_own_source_contradicts_is_undecided():
    one = next(claim for claim in REGISTRY.claims if claim.id == HF_MEMORY)
    again = [replace(one, id=f"{one.id}-again", value=value) for value in (90.0, 50.6)]
    found = [judged(Registry([one, other], REGISTRY.read_as, ()), CostModel(), NO_RECORDS) for other in again]
    assert [each[0].verdict for each in found] == [Verdict.UNDECIDED, Verdict.CONSISTENT]
    assert f"its own source also gives {HF_MEMORY}-again 90.0 GiB" in found[0][0].why


@pytest.mark.parametrize(
    ("claimed", "band", "verdict"),
    [
        (10.0, Band(8, 10, 12), Verdict.CONSISTENT),
        (12.5, Band(8, 10, 12), Verdict.UNDECIDED),
        (14.0, Band(8, 10, 12), Verdict.INCONSISTENT),
        (7.5, Band(8, 10, 12), Verdict.UNDECIDED),
        (12.2, Band(11.9, 12, 12), Verdict.INCONSISTENT),
    ],
)
def test_a_claim_is_held_against_the_band_and_its_edge(claimed, band, verdict):
    assert against_band((claimed, claimed), band, 0.1) is verdict


def test_a_published_number_is_as_exact_as_its_digits_or_its_chart():
    ranges = {claim.id: claimed_range(claim) for claim in REGISTRY.claims}
    assert ranges["hf-ulysses-mem-sp4-8k"] == pytest.approx((23.35, 23.45))
    assert ranges["hf-ulysses-revB-tput-sp4-64k"] == (13395.5, 13396.5)
    assert ranges["easycontext-700k"] == (650000, 750000)
    low, high = ranges["ds-ulysses-fig3-ulysses-8k"]
    assert high - low == 4
