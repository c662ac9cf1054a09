"""Out of memory is detected in seconds, distinguished from other failures, and recorded with its tensors."""

import itertools
import time

import pytest
import torch
from rich.console import Console

from bench.config import ConfigError
from bench.plan.plan import plan
from bench.ranks.memory_limit import ROOM_BYTES, without_memory_limit
from bench.run.progress import Progress
from bench.run.sweep import run_plan
from tests.support.cells import (
    CHECKS,
    FOUR_H100,
    INSTALLED,
    TWO_CORES,
    make_cell,
    make_raw,
    run_cell,
    tiny_cell,
)
from tests.support.faults import acts
from tests.support.gpus import OUT_OF_MEMORY_IN
from tests.support.records import read_lines

MIB = 2**20
FOUND_WITHIN_S = 5
SHORT, LONG = "1k", "32k"
LIMIT_GIB = 0.1
FREE_HEAP_BYTES = 8 * MIB
"""Free gaps in the heap that tensors fill after the limit was set; 2.4 MiB were observed."""
QUICK = ("measure.steps=1", "measure.warmup_steps=0", "measure.trace=false", "cluster=cpu",
         "measure.repeats=1", "measure.reference_budget_s=0")  # fmt: skip
ENGINES = ("ddp", "fsdp2", "zero3")
HUGE = ("ring_self_attention",)
"""Strategies that keep all scores, which would take 17 GB here at the long length."""
GRID = [*itertools.product([name for name in INSTALLED if name not in HUGE], ENGINES)]

PEAKS_MIB = {
    ("local", "ddp"): (8.35, 169.03),
    ("deepspeed_ulysses", "fsdp2"): (3.87, 75.57),
}
"""Peak of tensors at both lengths without a limit; the slow test measures it again."""
COVER = [*PEAKS_MIB]
STEP_PHASES = ("load", "forward", "loss", "backward", "optimizer")


def run_sweep(launcher, folder, cells):
    """Records of a sweep by strategy, engine and length, and its exit code."""
    raws = [
        make_raw(
            *QUICK,
            f"sweep_dir={folder}",
            f"strategy={strategy}",
            f"engine={engine}",
            f"seq_len={length}",
            *more,
        )
        for (strategy, engine, length), more in cells.items()
    ]
    progress = Progress(Console(quiet=True))
    code = run_plan(plan(raws, TWO_CORES, single=False), launcher, progress, write_report=lambda _: True)
    records = read_lines(folder / "records.jsonl")
    keys = [tuple(r["config"][key] for key in ("strategy", "engine", "seq_len")) for r in records]
    return dict(zip(keys, records, strict=True)), code


def check_halfway(launcher, folder, peaks_mib):
    """A limit halfway between the peaks of two lengths ends the long cells and no short one."""
    cells = {
        (*pair, length): (f"cluster.memory_limit_gib={sum(peaks) / 2 / 1024:.4f}",)
        for pair, peaks in peaks_mib.items()
        for length in (SHORT, LONG)
    }
    records, code = run_sweep(launcher, folder, cells)
    statuses = {key: record["status"] for key, record in records.items()}
    expected = {1024: "ok", 32768: "out_of_memory"}
    assert statuses == {(*pair, n): status for pair in peaks_mib for n, status in expected.items()}
    assert code == 0
    for record in records.values():
        if record["status"] == "out_of_memory":
            assert record["failure"]["detected_after_s"] < FOUND_WITHIN_S
            assert record["failure"]["step_phase"] in STEP_PHASES
            # Messages of oneDNN and of threads have no size.
            has_size = "tried to allocate" in record["failure"]["message"]
            assert bool(record["failure"]["out_of_memory"]["requested_bytes"]) == has_size


def test_memory_limit_between_peaks_ends_only_long_cells(launcher, tmp_path):
    assert set(PEAKS_MIB) <= set(GRID)
    check_halfway(launcher, tmp_path, PEAKS_MIB)


@pytest.mark.slow
def test_memory_limit_ends_long_cells_of_every_strategy(launcher, tmp_path):
    cells = {(*pair, length): () for pair in GRID for length in (SHORT, LONG)}
    records, code = run_sweep(launcher, tmp_path / "free", cells)
    assert code == 0
    peaks_mib = {}
    for pair in GRID:
        sizes = [records[(*pair, n)]["memory"]["whole_life_allocated_bytes"] for n in (1024, 32768)]
        peaks_mib[pair] = tuple(max(size) / MIB for size in sizes)
    assert {pair: pytest.approx(peaks_mib[pair], rel=0.05) for pair in COVER} == PEAKS_MIB
    check_halfway(launcher, tmp_path / "limited", peaks_mib)


def test_out_of_memory_record_has_request_and_largest_tensors(launcher, tmp_path):
    words = ("strategy=local", "engine=ddp", "seq_len=16k", f"cluster.memory_limit_gib={LIMIT_GIB}")
    record, _ = run_cell(launcher, make_cell(*QUICK, *words, "batch=2"), tmp_path, without=CHECKS)
    shortage = record.failure.out_of_memory
    assert (record.status, record.failure.rank) == ("out_of_memory", 0)
    assert record.failure.phase == OUT_OF_MEMORY_IN
    assert shortage.memory == "host"
    assert shortage.limit_bytes == round(LIMIT_GIB * 2**30)
    assert shortage.requested_bytes >= MIB
    assert 0 < shortage.allocated_bytes <= shortage.limit_bytes
    # Temporary tensors of the failed operator are freed before the rank counts.
    assert shortage.allocated_bytes + shortage.requested_bytes > 0.75 * shortage.limit_bytes
    totals = [block.total_bytes for block in shortage.largest]
    assert totals == sorted(totals, reverse=True)
    assert 5 <= len(totals) <= 10
    assert shortage.largest[0].role == "activation"
    assert sum(totals) <= shortage.allocated_bytes + ROOM_BYTES + FREE_HEAP_BYTES


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (acts.run_out_of_memory_in_rank_1_and_hang_up_first, ()),
        (acts.run_out_of_memory_and_fail_in_cleanup, ()),
        (acts.run_out_of_memory_and_never_leave, ()),
        (acts.abort_like_a_limit_in_rank_1, ("cluster.memory_limit_gib=1",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.usefixtures("short_grace")
def test_out_of_memory_of_one_rank_is_the_cause(launcher, tmp_path, fault, words):
    cell, start = tiny_cell("engine=ddp", "measure.timeout_s=60", *words), time.monotonic()
    record, _ = run_cell(launcher, cell, tmp_path, fault)
    assert (record.status, record.failure.rank) == ("out_of_memory", 1), record.reason
    assert record.failure.detected_after_s < FOUND_WITHIN_S
    assert time.monotonic() - start < 50
    shortage = record.failure.out_of_memory
    assert (shortage.memory, shortage.requested_bytes) == ("host", None)


def test_library_memory_counts_in_the_base_not_in_the_limit(launcher, tmp_path):
    """Libraries take 50 MiB here and tensors 8, while limit and room together are 45."""
    words = ("strategy=ring", "engine=fsdp2", "seq_len=2k", "cluster.memory_limit_gib=0.02")
    limited, _ = run_cell(launcher, make_cell(*QUICK, *words), tmp_path)
    assert limited.status == "ok", limited.reason
    assert min(limited.memory.limit_base_bytes) > 100 * MIB


@pytest.mark.parametrize("value", ["0", "0.019", "much", ".inf"])
def test_invalid_memory_limit_is_refused_in_one_line(value):
    with pytest.raises(ConfigError, match=r"cluster\.memory_limit_gib=.*write for example") as refused:
        make_cell(f"cluster.memory_limit_gib={value}")
    assert "\n" not in str(refused.value)
    gpu = make_cell("cluster.memory_limit_gib=0.01", machine=FOUR_H100)  # too little for a CPU rank
    assert gpu.flat()["cluster.memory_limit_gib"] == 0.01
    assert gpu.cell_id != make_cell(machine=FOUR_H100).cell_id


@pytest.mark.parametrize(("limit", "expected"), [(0.25, [1.0, "emptied", 0.25]), (1.0, [])])
def test_without_memory_limit_lifts_and_restores_a_gpus_limit(monkeypatch, limit, expected):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: limit)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    with without_memory_limit():
        assert calls == expected[:1]
    assert calls == expected
