import pytest

from analysis.cells.capacity import capacity_label
from analysis.read.hardware import HARDWARE_FOLDER, hardware_facts
from analysis.show.figures.figures import CPU_LIMIT_REMARK
from tests.support.drawing import sheet_of
from tests.support.records import CPU, make_failure, make_record

GIB = 2**30
H100_BYTES = 85520809984
RECORDED = {"environment": {"device_name": "NVIDIA H100 NVL", "gpu_memory_bytes": [94 * GIB]}}
LIMIT = {"cluster.memory_limit_gib": 4.0}
NOMINAL_GB = {"b200": 192, "l20": 48, "rtx_4090": 24}
"""Memory in GB of the hardware whose name does not end with it."""
DEVICES = sorted(path.stem for path in HARDWARE_FOLDER.glob("*.yaml") if "memory_bytes:" in path.read_text())


def peak(gib, **config):
    memory = make_record()["memory"] | {"peak_allocated_bytes": [int(gib * GIB)] * 2}
    return make_record(config=config, memory=memory)


@pytest.mark.parametrize(
    ("record", "size", "label"),
    [
        (make_record(), H100_BYTES, "h100_80gb: 79.6 GiB"),
        (make_record(**RECORDED), 94 * GIB, "NVIDIA H100 NVL: 94.0 GiB"),
        (make_record(config={"cluster.ranks_per_gpu": 4}), H100_BYTES / 4, "h100_80gb: 19.9 GiB"),
        (make_record(config=LIMIT), 4 * GIB, "limit 4 GiB"),
        (make_record(config=LIMIT | CPU), 4 * GIB, "limit 4 GiB"),
        (make_record(config={"cluster.memory_limit_gib": 500}), H100_BYTES, "h100_80gb: 79.6 GiB"),
        (make_record(**RECORDED | {"provenance": "predicted"}), H100_BYTES, "h100_80gb: 79.6 GiB"),
    ],
)
def test_capacity_is_the_limit_or_device_or_hardware_memory(summary_of, record, size, label):
    cell = summary_of([record]).iloc[0]
    assert cell["capacity_bytes"] == size
    assert capacity_label(cell) == label
    assert cell["capacity_share"] == pytest.approx(2 * GIB / size)


@pytest.mark.parametrize(("config", "recorded"), [(CPU, RECORDED), ({"hardware": "unknown"}, {})])
def test_no_capacity_on_a_cpu_or_on_unknown_hardware(summary_of, config, recorded):
    cell = summary_of([make_record(config=config, **recorded)]).iloc[0]
    assert (str(cell["capacity_bytes"]), capacity_label(cell)) == ("nan", "")


def test_hardware_files_state_the_memory():
    for name in DEVICES:
        nominal_gb = NOMINAL_GB.get(name) or float(name.rsplit("_", 1)[1].removesuffix("gb"))
        assert 1 <= hardware_facts("memory_bytes")[name] / (nominal_gb * 1e9) < 1.1


def capacities(sheet):
    """Return the height of each horizontal line by its label."""
    across = [line for line in sheet.axes.lines if line.get_transform() == sheet.axes.get_yaxis_transform()]
    return {line.get_label().removeprefix("capacity: "): line.get_ydata()[0] for line in across}


def memory_of(cells_of, *records):
    return sheet_of("peak_memory", cells_of(records))


def test_memory_figure_has_a_labelled_line_per_capacity(cells_of):
    other = {"cluster.memory_limit_gib": 4.1}
    sheet = memory_of(cells_of, peak(2, **LIMIT), peak(3, **other, seq_len=16384))
    assert capacities(sheet) == {"limit 4 GiB": 4 * GIB, "limit 4.1 GiB": 4.1 * GIB}
    bottom, top = sheet.axes.get_ylim()
    assert all(bottom < y < top for y in capacities(sheet).values())
    assert sheet.remarks == []
    assert memory_of(cells_of, peak(2, **LIMIT | CPU)).remarks == [CPU_LIMIT_REMARK]


def test_memory_figure_draws_a_far_capacity_only_after_oom(cells_of):
    far = memory_of(cells_of, peak(0.01, **LIMIT))
    assert (capacities(far), far.remarks) == ({}, ["Left out: 1 other capacity (in summary.csv)"])
    oom = make_failure("out_of_memory", "no", config=LIMIT | {"seq_len": 65536})
    sheet = memory_of(cells_of, peak(0.01, **LIMIT), oom)
    assert capacities(sheet) == {"limit 4 GiB": 4 * GIB}
    assert [line.get_marker() for line in sheet.panels[0].lines] == ["x"]


def test_memory_figure_draws_the_lowest_capacities(cells_of):
    limits = [{"cluster.memory_limit_gib": 4.0 + number} for number in range(5)]
    sheet = memory_of(cells_of, *(peak(2, **limit) for limit in limits))
    assert [*capacities(sheet)] == ["limit 4 GiB", "limit 5 GiB", "limit 6 GiB"]
    assert sheet.remarks == ["Left out: 2 other capacities (in summary.csv)"]
