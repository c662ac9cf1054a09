"""GPUs and inherited variables in a record's environment, with a fake driver behind nvidia-ml-py."""

import re
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest.mock import create_autospec

import pynvml
import pytest
import torch
from msgspec import to_builtins

from bench.common import environment, nvml
from bench.common.environment import describe_environment, inherited_env, this_machine, torch_cuda
from bench.config import ConfigError
from bench.measure import decode_reports
from bench.plan.planned import planned_cell
from bench.ranks.device import nccl_version
from bench.request.resolve import resolve
from bench.run.cell.outcome import completed_record
from tests.support.cells import TWO_CORES, make_raw, tiny_cell

LINKS = 18
ANCESTORS = {(0, 1): pynvml.NVML_TOPOLOGY_SINGLE, (0, 2): pynvml.NVML_TOPOLOGY_SYSTEM,
             (1, 2): pynvml.NVML_TOPOLOGY_SYSTEM}  # fmt: skip
P2P = {(0, 1): (0, 0), (0, 2): (0, 5), (1, 2): (pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED, 5)}
"""Status of reads, and of NVLink, for each pair of GPUs."""


def link_state(handle, link):
    if link >= LINKS:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return int(link != 4)


DRIVER = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580.1",
    "nvmlDeviceGetCount": lambda: 3,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetName": lambda handle: f"a GPU {handle}",
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=2**36 + handle, used=5),
    "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, handle),
    "nvmlDeviceGetMigMode": lambda handle: (0, 0),
    "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
    "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 500_000 + handle,
    "nvmlDeviceGetTemperature": lambda handle, sensor: 40 + handle + 100 * sensor,
    "nvmlDeviceGetNvLinkState": link_state,
    "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: ANCESTORS[one, other],
    "nvmlDeviceGetP2PStatus": lambda one, other, index: P2P[one, other][index // 2],
}


@pytest.fixture
def driver(monkeypatch):
    """Driver with three GPUs; the fixture is a function that makes one of the driver's functions fail."""

    def fail(name, number):
        monkeypatch.setattr(pynvml, name, create_autospec(real[name], side_effect=pynvml.NVMLError(number)))

    real = {name: getattr(pynvml, name) for name in DRIVER}
    for name, answer in DRIVER.items():
        monkeypatch.setattr(pynvml, name, create_autospec(real[name], side_effect=answer))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "DEVICE_NODES", ())
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")
    this_machine.cache_clear()
    yield fail
    this_machine.cache_clear()


def test_environment_states_gpus_and_their_links(driver):
    assert {
        name: value
        for name, value in to_builtins(describe_environment({})).items()
        if name.startswith("gpu_")
    } == {
        "gpu_memory_bytes": [2**36, 2**36 + 1, 2**36 + 2],
        "gpu_capabilities": ["9.0", "9.1", "9.2"],
        "gpu_driver": "580.1",
        "gpu_power_limit_w": [500.0, 500.001, 500.002],
        "gpu_temperature_c": [40, 41, 42],
        "gpu_nvlinks": [LINKS - 1] * 3,
        "gpu_topology": {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"},
        "gpu_p2p": {"0-1": "NVLink", "0-2": "PCIe", "1-2": "GPU not supported"},
    }


NAMES = {"nvmlDeviceGetTemperature": "gpu_temperature_c", "nvmlDeviceGetP2PStatus": "gpu_p2p"}


@pytest.mark.parametrize("function", NAMES)
def test_environment_omits_only_facts_the_driver_lacks(driver, function):
    driver(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    found = to_builtins(describe_environment({}))
    assert [name for name in NAMES.values() if name not in found] == [NAMES[function]]


@pytest.mark.parametrize(
    ("number", "node", "visible", "message"),
    [
        (pynvml.NVML_ERROR_UNKNOWN, True, None, "nvidiactl exists, but NVML cannot read its GPU: Unknown"),
        (pynvml.NVML_ERROR_UNKNOWN, True, "NoDevFiles", None),
        (pynvml.NVML_ERROR_UNKNOWN, False, None, None),
        (pynvml.NVML_ERROR_GPU_NOT_FOUND, True, None, None),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, True, None, "libnvidia-ml does not; start a container with"),
    ],
)
def test_device_node_of_an_unreadable_gpu_is_an_error(
    driver, monkeypatch, tmp_path, number, node, visible, message
):
    monkeypatch.setattr(nvml, "DEVICE_NODES", (tmp_path / "nvidiactl",))
    if node:
        (tmp_path / "nvidiactl").touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver("nvmlInit", number)
    machine = this_machine.__wrapped__()
    assert machine.gpus == ()
    assert machine.gpu_error is None if message is None else message in machine.gpu_error


def refusal_on(machine):
    """Error of a request on a machine whose GPUs cannot be used; cluster=cpu stays possible."""
    assert machine.gpus == ()
    assert resolve(make_raw("cluster=cpu"), machine).cluster.device == "cpu"
    with pytest.raises(ConfigError) as raised:
        resolve(make_raw(), machine)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith("cluster=cpu")
    return message


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("7", "CUDA_VISIBLE_DEVICES=7 names none of the 3 GPUs of this machine; correct it or unset it"),
        (
            "MIG-1,MIG-2",
            "CUDA_VISIBLE_DEVICES=MIG-1,MIG-2 names a MIG slice of a GPU; only whole GPUs are supported",
        ),
        (" -1 ", None),
    ],
)
def test_visible_devices_without_a_match_are_refused(driver, monkeypatch, visible, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = this_machine.__wrapped__()
    if message is None:
        assert (machine.gpus, machine.gpu_error) == ((), None)
    else:
        assert message in refusal_on(machine)


@pytest.mark.parametrize(("visible", "gpus"), [(None, 0), ("1", 0), ("0,2", 2)])
def test_mig_gpus_are_refused(driver, monkeypatch, visible, gpus):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: (int(handle == 1), 0))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = this_machine.__wrapped__()
    assert len(machine.gpus) == gpus
    if not gpus:
        assert "a GPU 1 is divided into MIG slices; only whole GPUs are supported" in refusal_on(machine)


@pytest.mark.parametrize("function", ["nvmlDeviceGetMigMode", "nvmlSystemGetCudaDriverVersion_v2"])
def test_driver_without_mig_mode_or_cuda_version_is_accepted(driver, function):
    driver(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert len(this_machine.__wrapped__().gpus) == 3


@pytest.mark.parametrize(
    ("built_for", "newest", "message"),
    [
        ("", 13010, "is built without CUDA and cannot use a GPU 0, .* install a build of torch"),
        (
            "13.0",
            12080,
            "is built for CUDA 13.0 and cannot use a GPU 0, whose driver supports CUDA 12.8 and older",
        ),
        ("12.8", 12040, None),
    ],
)
def test_gpu_that_torch_cannot_use_is_refused(driver, monkeypatch, built_for, newest, message):
    """A driver runs all programs of its major version of CUDA."""
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: newest)
    monkeypatch.setattr(environment, "torch_cuda", lambda: built_for)
    machine = this_machine.__wrapped__()
    if message is None:
        assert len(machine.gpus) == 3
    else:
        assert re.search(message, refusal_on(machine))


def test_torch_cuda_is_read_without_importing_torch():
    assert torch_cuda() == (torch.version.cuda or "")


def test_inherited_env_has_only_variables_that_change_a_cell(monkeypatch):
    recorded = {"CUDA_VISIBLE_DEVICES": "0", "DS_SKIP_CUDA_CHECK": "1", "PYTORCH_ALLOC_CONF": "x"}
    secret = {"HF_TOKEN": "x", "MY_NCCL_KEY": "z"}
    own = {"DS_ACCELERATOR": "cpu", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    assert inherited_env(secret | recorded | own) == recorded
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert describe_environment({}).inherited_env["NCCL_ALGO"] == "Ring"


def test_nccl_version_is_in_the_environment(monkeypatch):
    monkeypatch.setattr(torch._C, "_nccl_version", lambda: (2 << 32) | (28 << 16) | 9, raising=False)
    monkeypatch.setattr(torch._C, "_nccl_version_suffix", lambda: b"", raising=False)
    assert nccl_version(torch.device("cpu")) == {}
    version = nccl_version(torch.device("cuda", 0))
    (report,), planned = (
        decode_reports([{"phases_s": {}, "software": version}]),
        planned_cell(tiny_cell(), TWO_CORES),
    )
    record = completed_record(planned, [report], {}, [], None, 1.0, datetime.now(UTC))
    assert record.environment.nccl_version == "2.28.9"


def test_idle_gpus_are_indices_among_visible_gpus(driver, monkeypatch):
    busy = create_autospec(pynvml.nvmlDeviceGetUtilizationRates, side_effect=lambda i: SimpleNamespace(gpu=i))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", busy)
    assert nvml.idle_gpus() == {0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert nvml.idle_gpus() == {1}


def test_gpu_without_nvlink_has_no_active_link(driver):
    driver("nvmlDeviceGetNvLinkState", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert nvml.gpu_facts()["gpu_nvlinks"] == [0, 0, 0]


def test_driver_that_fails_reports_no_uuids_and_no_idle_gpus(driver):
    driver("nvmlInit", pynvml.NVML_ERROR_UNKNOWN)
    assert (nvml.visible_uuids(), nvml.idle_gpus()) == ([], set())
