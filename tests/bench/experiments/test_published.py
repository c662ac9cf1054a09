"""`experiment=published_memory` and `published_throughput`: their cells, what they say, and the page."""

from dataclasses import replace

import pytest

from bench.cell.outcome import analytic
from bench.config import ConfigError
from bench.environment import REPOSITORY
from bench.experiments.published import opening, published_cells
from bench.experiments.published_table import memory_text, throughput_text
from bench.request.composition import composed
from tests.cells import FOUR_H100, TWO_CORES

ONE_H100 = replace(FOUR_H100, gpus=FOUR_H100.gpus[:1])
PAGE = REPOSITORY / "docs" / "published_memory.md"


def cells_of(name, *words, machine=TWO_CORES):
    return published_cells([composed(f"experiment=published_{name}", *words)], machine)


def line_of(cell, **more):
    """A record's line of a cell that was predicted."""
    told = {"provenance": "predicted", "status": "ok", "reason": None, "analytic": analytic(cell)}
    return {"config": cell.flat(), **told, **more}


@pytest.fixture(scope="module")
def predicted():
    return cells_of("memory", "trainer=native")


def test_without_gpus_the_post_is_predicted_for_four_h100_and_the_first_line_says_so(predicted):
    named = {(cell.mode, cell.hardware, cell.model.name, cell.engine.name, cell.loss) for cell in predicted}
    assert named == {("predict", "h100_80gb", "qwen3_4b", "zero3", "untiled")}
    asked = [(c.seq_len // 1024, c.cluster.world_size, c.sp_degree) for c in predicted if c.offload.optimizer]
    assert asked == [(8, 1, 1), (8, 4, 4), (32, 4, 4), (64, 4, 4), (96, 4, 4), (128, 4, 4)]
    assert len(predicted) == 2 * len(asked)
    assert {(cell.grad_accum, cell.checkpointing) for cell in predicted} == {(8, True)}
    first = opening([composed("experiment=published_memory")], TWO_CORES)
    assert first.startswith("predicted, not measured: arithmetic for 4 x h100_80gb")


@pytest.mark.parametrize(
    ("words", "machine", "mode"),
    [
        ((), FOUR_H100, "measure"),
        (("mode=predict",), FOUR_H100, "predict"),
        (("trainer=native",), ONE_H100, "replay"),
        (("trainer=native", "hardware=h200_141gb"), ONE_H100, "predict"),
        (("model=qwen3_nano",), TWO_CORES, "measure"),
        (("model=qwen3_8b",), TWO_CORES, "predict"),
    ],
)
def test_it_is_measured_where_it_can_run(words, machine, mode):
    cells = cells_of("throughput", *words, machine=machine)
    assert {cell.mode for cell in cells} == {mode}
    assert {cell.offload.optimizer for cell in cells} == {False}


def test_gpus_that_cannot_be_used_are_no_reason_to_predict():
    broken = replace(TWO_CORES, gpu_error="a GPU is here, but torch is built without CUDA; install a build")
    with pytest.raises(ConfigError, match="is built without CUDA; install a build, or take cluster=cpu"):
        cells_of("throughput", machine=broken)
    assert {cell.mode for cell in cells_of("throughput", "cluster=cpu", machine=broken)} == {"predict"}


def test_what_is_named_wins():
    words = ("model=qwen3_nano", "seq_len=1k", "cluster.world_size=2", "strategy=ring", "loss=chunked")
    base, cell = cells_of("throughput", "trainer=native", *words)
    assert (cell.strategy, cell.cluster.world_size, cell.loss, cell.seq_len) == ("ring", 2, "chunked", 1024)
    assert (base.strategy, base.cluster.world_size, base.seq_len) == ("local", 1, 1024)


def test_the_page_has_the_numbers_that_the_command_prints(predicted):
    told = memory_text([line_of(cell) for cell in predicted]).splitlines()
    page = PAGE.read_text().splitlines()
    missing = [line for line in told if line.startswith(("|", "-")) and line not in page]
    assert not missing


def test_other_cells_are_held_against_nothing_published(predicted):
    other = replace(predicted[1], model=replace(predicted[1].model, name="qwen3_0_6b"))
    assert "23.4" not in memory_text([line_of(other)])


def test_throughput_stands_beside_both_revisions():
    (cell,) = (each for each in cells_of("throughput", "trainer=native") if each.seq_len == 65536)
    timing = {"tokens_per_step": cell.tokens_per_step, "step_times_ms": [[40000.0], [44026.0]]}
    (row,) = (
        line for line in throughput_text([line_of(cell, timing=timing)]).splitlines() if "| 64k" in line
    )
    assert row.split(" | ")[4:] == ["11,909", "2,977", "", "13,396", "13,396 |"]


def test_a_replay_on_one_gpu_stands_there_as_a_bracket_and_its_peak_as_replayed():
    every = cells_of("throughput", "trainer=native", machine=ONE_H100)
    cells = [each for each in every if each.sp_degree == 4]
    record = {
        "provenance": "replayed",
        "timing": {"tokens_per_step": cells[0].tokens_per_step, "step_times_ms": [[20000.0]]},
    }
    lines = [line_of(cell, **record) for cell in cells]
    for line in lines:
        line["memory"] = {"peak_allocated_bytes": [line["config"]["seq_len"] * 2**19]}
        line["analytic"]["link_ms"] = {"attention": {"low": 1.0, "expected": 2.0, "high": 500.0}}
    row = next(line for line in throughput_text(lines).splitlines() if "| 8k" in line)
    assert row.split(" | ")[3:7] == ["replayed", "3,197 to 3,277", "799 to 819", ""]
    assert "- Replayed slope, native, optimizer on the device: 16 GiB per 32k tokens" in memory_text(lines)
