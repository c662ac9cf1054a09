"""Sections of `experiment=published_memory` and `published_throughput`, and their page in docs."""

import pytest
from msgspec import to_builtins

from analysis.report import write_report
from analysis.show.markdown import markdown_section
from analysis.show.sections.published import (
    PEAKS_GB,
    REVISIONS,
    published_memory_section,
    published_throughput_section,
)
from bench.common.environment import REPOSITORY
from bench.common.labels import GIB
from bench.cost.memory import memory_need
from bench.extras.predict.predicted_record import prediction_of
from bench.run.cell.outcome import analytic
from tests.bench.plan.experiments.test_published import cells_of
from tests.support.cells import FOUR_H100
from tests.support.records import FAILED, make_record, make_timing, write_sweep
from tests.support.sections import findings_of

PAGE = REPOSITORY / "docs" / "published_memory.md"
OUT = FAILED | {"status": "out_of_memory", "reason": "rank 0, timing loss: no room for 9.0 GiB more"}


@pytest.fixture
def text_of(tmp_path):
    """Return a function from records to the Markdown of their section."""

    def text(*records):
        findings = findings_of(tmp_path, [*records])
        return markdown_section(published_memory_section(findings) or published_throughput_section(findings))

    return text


def record_of(cell, *, device="NVIDIA H100 80GB HBM3", seconds=None, gib=None, config=None, **fields):
    """Return a record of the cell with steps of `seconds` and a peak of `gib`; measured by default."""
    record = make_record(config={**cell.flat(), **(config or {})}, experiment=cell.experiment)
    record |= {
        "analytic": to_builtins(analytic(cell, need=memory_need(cell))),
        "environment": {"device_name": device},
    }
    if seconds is not None:
        record["timing"] = make_timing([[1e3 * seconds] * 6] * 4, cell.tokens_per_step)
    if gib is not None:
        record["memory"] |= {
            "peak_allocated_bytes": [round(gib * GIB)],
            "device_used_bytes": [(gib + 2) * GIB],
        }
    return record | fields


def rows_of(text):
    """Return the texts of each row of the table."""
    table = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("|")]
    return table[2:]


def cell_of(name, kilo, *words, ranks=4):
    """Return the cell at a length in thousands of tokens on four H100."""
    cells = cells_of(name, "trainer=native", "offload.optimizer=false", *words, machine=FOUR_H100)
    return next(c for c in cells if (c.seq_len // 1024, c.cluster.world_size) == (kilo, ranks))


def test_docs_page_has_the_numbers_that_the_command_prints(text_of):
    cells = cells_of("memory", "trainer=native")
    records = [record_of(cell, **FAILED, provenance="predicted") for cell in cells]
    for cell, record in zip(cells, records, strict=True):
        record["analytic"]["prediction"] = to_builtins(prediction_of(cell).as_record())
    page = PAGE.read_text().splitlines()
    text = text_of(*records)
    assert len(rows_of(text)) == 12
    missing = [
        line for line in text.splitlines() if line.startswith(("|", "- Published")) and line not in page
    ]
    assert not missing, "paste the table and the slopes that `experiment=published_memory` prints"


@pytest.mark.parametrize(
    ("kilo", "seconds", "revisions"),
    [
        (
            8,
            8 * 8192 / 3933,
            [
                "2,315: faster than published; 1.46 s per micro-step more than ours",
                "3,933: as published; 0.00 s per micro-step more than ours",
            ],
        ),
        (32, 8 * 32768 / 3000, ["7,872: slower than published; 6.76 s per micro-step less than ours"]),
        (64, 8 * 65536 / 13396 * 1.15, ["13,396: undecided; 0.73 s per micro-step less than ours"]),
        (96, 60, ["nothing published", "nothing published"]),
    ],
)
def test_rate_is_compared_with_both_revisions(text_of, kilo, seconds, revisions):
    (row,) = rows_of(text_of(record_of(cell_of("throughput", kilo), seconds=seconds)))
    assert row[-2:][: len(revisions)] == revisions


@pytest.mark.parametrize(
    ("kilo", "fields", "verdict"),
    [
        (8, {"gib": 19.0}, "23.4: less memory than published; 2.40 to 4.40 GiB more than ours"),
        (32, {"gib": 30.5}, "35.0: undecided; 2.50 to 4.50 GiB more than ours"),
        (64, {"gib": 49.0}, "50.5: as published; 0.50 GiB less to 1.50 more than ours"),
        (96, {"gib": 74.0}, "66.0: more memory than published; 8.00 to 10.0 GiB less than ours"),
        (96, OUT, "66.0: out of memory where the source ran"),
        (128, OUT, "OOM: out of memory as published"),
        (128, {"gib": 70.0}, "OOM: ran where the source ran out of memory"),
        (128, FAILED | {"status": "timed_out", "reason": "1800 s"}, "OOM: timed out"),
    ],
)
def test_peak_is_compared_with_number_or_out_of_memory(text_of, kilo, fields, verdict):
    assert rows_of(text_of(record_of(cell_of("memory", kilo), **fields)))[0][-1] == verdict


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"config": {"model": "qwen3_0_6b"}}, "model=qwen3_0_6b"),
        ({"config": {"engine": "fsdp2"}}, "engine=fsdp2"),
        ({"config": {"loss": "chunked", "strategy": "ring"}}, "strategy=ring, loss=chunked"),
        ({"config": {"cluster.ranks_per_gpu": 4}}, "cluster.ranks_per_gpu=4"),
        ({"config": {"cluster.memory_limit_gib": 40.0}}, "cluster.memory_limit_gib=40.0"),
        ({"config": {"hardware": "h200_141gb"}}, "hardware=h200_141gb"),
        ({"device": "NVIDIA H100 PCIe"}, "device=NVIDIA H100 PCIe"),
    ],
)
def test_other_settings_are_not_comparable(text_of, fields, reason):
    (row,) = rows_of(text_of(record_of(cell_of("memory", 8), gib=23.4, **fields)))
    assert row[-1] == f"not comparable: {reason}"


def test_rows_name_kernel_trainer_and_optimizer_offload(text_of):
    cell = cell_of("throughput", 64)
    stacks = [("native", "torch_flash"), ("native", "cudnn"), ("trl", "torch_flash"), ("trl", "flash_attn_2")]
    configs = [
        {"trainer": trainer, "kernel": kernel, "offload.optimizer": True} for trainer, kernel in stacks
    ]
    rows = rows_of(text_of(*(record_of(cell, seconds=40, config=config) for config in configs)))
    named = {tuple(sorted(row[0].split(", ")[1:])) for row in rows}
    assert named == {tuple(sorted(stack)) for stack in stacks}
    assert all("as published" in row[-1] for row in rows)


def test_ratio_over_one_gpu_has_base_of_same_settings(text_of):
    base, cell = cell_of("throughput", 8, ranks=1), cell_of("throughput", 64)
    other = record_of(cell, seconds=40, config={"kernel": "cudnn"})
    rows = rows_of(text_of(record_of(base, seconds=20), record_of(cell, seconds=40), other))
    ratios = {row[0]: row[-3] for row in rows}
    assert ratios == {
        "local, torch_flash": "1.00x",
        "deepspeed_ulysses, torch_flash": "4.00x",
        "deepspeed_ulysses, cudnn": "",
    }


@pytest.mark.parametrize(
    ("seconds", "link_ms", "verdict"),
    [
        (8 * 65536 / 13396 / 1.5, 100, "faster than published; 1.62 to 1.63 s per micro-step more"),
        (8 * 65536 / 13396 / 1.5, 20000, "undecided; 0.87 s per micro-step less to 1.63 more"),
        (8 * 65536 / 13396 * 1.5, 20000, "slower than published; 2.45 to 4.95 s per micro-step less"),
    ],
)
def test_replay_verdict_needs_both_ends_of_link_time(text_of, seconds, link_ms, verdict):
    record = record_of(cell_of("throughput", 64), seconds=seconds, provenance="replayed")
    record["analytic"] |= {"link_ms": {"attention": {"low": 1.0, "expected": 2.0, "high": float(link_ms)}}}
    (row,) = rows_of(text_of(record))
    assert " to " in row[4]
    assert row[-1] == f"13,396: {verdict} than ours"


@pytest.mark.parametrize(("gib", "verdict"), [(70.0, "ran where"), (77.9, "undecided")])
def test_replay_without_room_for_nccl_is_undecided(text_of, gib, verdict):
    record = record_of(cell_of("memory", 128), gib=gib, provenance="replayed")
    record["environment"] |= {"gpu_memory_bytes": [80 * GIB]}
    (row,) = rows_of(text_of(record))
    assert row[-1].startswith(f"OOM: {verdict}")


def test_replay_slope_is_reported_with_the_formula(text_of):
    lengths = (8, 64, 96)
    records = [record_of(cell_of("memory", k), gib=19.0 + k / 2, provenance="replayed") for k in lengths]
    assert "- Replayed slope, deepspeed_ulysses: 16 GiB per 32k" in text_of(*records)


def test_reading_states_the_tolerances(text_of):
    assert f"within {100 * PEAKS_GB.tolerance:.0f} %" in text_of(record_of(cell_of("memory", 8)))
    assert f"within {100 * REVISIONS[0].tolerance:.0f} %" in text_of(record_of(cell_of("throughput", 8)))


def test_every_view_has_the_table_and_other_sweeps_do_not(tmp_path, capsys):
    assert write_report(write_sweep(tmp_path / "post", [record_of(cell_of("memory", 8), gib=23.0)]))
    texts = [(tmp_path / "post" / name).read_text() for name in ("summary.md", "report.html")]
    assert all("23.4: as published" in " ".join(text.split()) for text in (*texts, capsys.readouterr().out))
    write_report(write_sweep(tmp_path / "other", [make_record()]))
    assert "Published memory" not in (tmp_path / "other" / "summary.md").read_text()
