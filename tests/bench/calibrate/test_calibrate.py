"""A calibration runs on real ranks, and predictions of a cell can be made of its file."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.calibrate import entry as calibration
from bench.calibrate.__main__ import DTYPES
from bench.calibrate.entry import calibrate, least_disturbed
from bench.calibrate.file import calibration_text, exchange_lines
from bench.calibrate.grid import CPU_GRID, GPU_GRID
from bench.cost.band import Band
from bench.cost.prediction import predict
from bench.request.hardware import hardware_of
from tests.cells import make_cell

FEW = replace(
    CPU_GRID,
    head_dims=(16,),
    vocabularies=(256,),
    rows=(512,),
    widths=(64,),
    tokens=(1024,),
    hidden=(64,),
    squares=(256,),
    rectangles=(256,),
    messages=(1024, 65536),
    tensors=(2,),
    tensor_numbers=(64,),
    fresh_bytes=2**25,
)
WORDS = ("strategy=ring", "dtype=fp32", "engine=ddp", "seq_len=2k", "cluster.world_size=2")


@pytest.fixture(scope="module")
def reports(launcher, tmp_path_factory):
    """Of two ranks and few sizes."""
    entry = partial(calibrate, grid=FEW, dtypes=("fp32",), engines=("ddp",))
    ends = launcher.run(make_cell(*WORDS), tmp_path_factory.mktemp("calibration"), entry=entry)
    assert [end.failure for end in ends] == [None, None]
    return [end.report for end in ends]


@pytest.fixture
def hardware(reports, tmp_path):
    file = tmp_path / "measured.yaml"
    file.write_text(calibration_text("measured", make_cell(*WORDS), reports))
    return hardware_of(str(file))


@pytest.mark.slow
def test_a_cell_is_predicted_from_what_two_ranks_measured(hardware):
    found = predict(make_cell(*WORDS), hardware, None)
    assert found is not None
    parts = found.parts
    assert min(parts.attention_ms, parts.other_compute_ms, parts.transfer_ms, parts.optimizer_ms) > 0
    assert found.step_time_ms.low <= found.step_time_ms.expected <= found.step_time_ms.high
    assert predict(make_cell(*WORDS, "engine=fsdp2"), hardware, None) is None


@pytest.mark.slow
def test_messages_are_printed_as_nccl_tests_does(reports):
    head, *lines = exchange_lines(reports, 2)
    assert head.split()[-4:] == ["algbw", "GB/s", "busbw", "GB/s"]
    (gathered,) = [line.split() for line in lines if line.startswith("all_gather") and "65,536" in line]
    algorithm, bus = map(float, gathered[-2:])
    assert algorithm == pytest.approx(2 * bus, rel=0.05)


def test_of_two_rounds_the_less_disturbed_counts_case_by_case():
    early, late = ("product", "bf16", (64,)), ("product", "bf16", (128,))
    quick, slow = Band(1, 2, 3), Band(0, 4, 5)
    assert least_disturbed([{early: quick, late: slow}, {early: slow, late: quick}]) == {
        early: quick,
        late: quick,
    }


def test_a_gpus_kernel_is_not_timed_in_a_dtype_that_it_lacks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(calibration, "make_groups", lambda _: None)
    cases = [*calibration._cases(make_cell("strategy=local"), GPU_GRID, DTYPES, (), torch.device("cuda"))]
    dtypes = {case.table: {each.dtype for each in cases if each.table == case.table} for case in cases}
    assert (dtypes["product"], dtypes["torch_flash_causal_forward"]) == ({"bf16", "fp32"}, {"bf16"})
