"""Records of `mode=predict`, and refusals of cells that cannot be predicted."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from bench.config import ConfigError
from bench.cost.band import Fit
from bench.extras.predict.hardware_file import hardware_of
from bench.extras.predict.predicted_record import prediction_of
from bench.plan.planned import planned_cell
from bench.record.record import Provenance, Status
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.run.cell.run import run
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.records import as_line, as_record

H100 = ("mode=predict", "hardware=h100_80gb", "model=qwen3_8b")


def record_of(*words):
    cell = make_cell(*H100, *words)
    return cell, run(planned_cell(cell, TWO_CORES), None, Path())


def test_predicted_record_has_the_sections_of_a_measurement():
    """The parts add up to the step as those of a trace do, and the step is that of the prediction."""
    cell, record = record_of("seq_len=128k", "strategy=ring")
    assert (record.status, record.provenance) == (Status.OK, Provenance.PREDICTED)
    prediction, trace = prediction_of(cell), record.trace
    step_ms = prediction.step_time_ms.expected
    assert record.timing.step_times_ms == [[step_ms]]
    assert record.timing.tokens_per_step == 2**17
    assert record.memory.peak_allocated_bytes == [prediction.peak_allocated_bytes.expected]
    parts = (*trace.compute_ms.values(), *trace.purpose_exposed_ms.values(), trace.idle_ms)
    assert sum(part[0] for part in parts) == pytest.approx(step_ms)
    assert trace.purpose_total_ms["attention"][0] > trace.purpose_exposed_ms["attention"][0]
    assert record.analytic.prediction.fit == Fit.FITS
    assert as_record(as_line(record)).timing is not None


def test_predicted_cell_may_have_more_devices_than_this_machine():
    cell, record = record_of("seq_len=1m", "cluster.world_size=1024", "strategy=usp", "model=qwen3_32b")
    assert (cell.cluster.world_size, cell.cluster.device, cell.hardware) == (1024, "cuda", "h100_80gb")
    assert record.status is Status.OK
    assert make_cell(*H100).cluster.world_size == 8  # one node, where it is left open


def test_cell_without_room_is_out_of_memory_as_in_the_plan():
    cell, record = record_of("seq_len=1m", "strategy=local")
    assert (record.status, record.provenance) == (Status.OUT_OF_MEMORY, Provenance.PREDICTED)
    assert record.reason.startswith("needs about ")
    assert record.reason.endswith(" per rank and has 79.1 GiB")
    assert record.timing is None
    assert planned_cell(cell, TWO_CORES).room.fit is Fit.OUT_OF_MEMORY


def test_attention_without_a_kernel_takes_the_time_of_its_scores():
    """Scores are moved 3 * 7 times by elementwise operations and once by each of 8 products."""
    cell = make_cell(
        *H100, "strategy=ring_self_attention", "seq_len=32k", "layout=contiguous", "checkpointing=true"
    )
    model, bytes_per_score = cell.model, 2 * (3 * 7 + 8)
    scores = model.num_layers * model.num_heads * 2**30 // 8
    h100 = hardware_of("h100_80gb")
    least_ms = 1e3 * scores * bytes_per_score / (h100.memory_bytes_per_s * h100.memory.expected)
    assert prediction_of(cell).parts.attention_ms == pytest.approx(least_ms, rel=0.05)


def with_cluster(**values):
    return lambda cell: replace(cell, cluster=replace(cell.cluster, **values))


REFUSED = [
    (lambda cell: replace(cell, workload=replace(cell.workload, name="attention")), "take workload=train"),
    (lambda cell: replace(cell, data=replace(cell.data, packing="documents")), "take data.packing=none"),
    (
        with_cluster(device="cpu", backend="gloo"),
        "hardware=h100_80gb is a GPU, but the ranks are on the CPU",
    ),
    (with_cluster(ranks_per_gpu=2), "take cluster.ranks_per_gpu=1"),
    (lambda cell: replace(cell, kernel="math"), "no rate of kernel=math on hardware=h100_80gb"),
    (lambda cell: replace(cell, hardware="cpu"), "no file has the rates of this CPU; leave mode=predict"),
    (
        lambda cell: replace(cell, hardware="unknown"),
        "hardware=unknown: no file of conf/hardware/ describes this device",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_unpredictable_cell_is_refused_with_a_way_out(change, reason):
    assert refusal(make_cell(*H100)) is None
    assert reason in refusal(change(make_cell(*H100)))


def test_options_cannot_change_the_rates_of_a_device():
    for key, value in {"hardware.links": {}, "hardware.colour": "green"}.items():
        with pytest.raises(ConfigError, match=r"copy conf/hardware/h100_80gb\.yaml, change the copy"):
            resolve(changed(key, value), TWO_CORES)


def changed(key, value):
    raw = deepcopy(make_raw(*H100))
    raw["hardware"][key.removeprefix("hardware.")] = value
    return raw
