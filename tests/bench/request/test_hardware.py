"""Hardware files are matched by the exact device name of NVML, and their numbers are plausible."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.common.labels import GIB
from bench.config import UNKNOWN_HARDWARE as UNKNOWN
from bench.config import ConfigError
from bench.request.choices import CONF, read_option
from bench.request.hardware import hardware_of_machine, known_hardware, usable_bytes
from bench.request.resolve import resolve
from tests.support.cells import FOUR_H100, TWO_CORES, raw_with

NO_FILES = ("NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM2e", "NVIDIA H20")
"""Names from public outputs of nvidia-smi; names with a file begin like the last two."""


def machine_with(gpu):
    return replace(FOUR_H100, gpus=(gpu,) * 4, gpu_memory_bytes=(96 * GIB, 95 * GIB))


def test_hardware_file_is_found_by_exact_device_name_only():
    files = [(gpu, name) for name, facts in known_hardware().items() for gpu in facts["device_names"]]
    assert max(Counter(gpu for gpu, _ in files).values()) == 1
    assert [hardware_of_machine(machine_with(gpu), "cuda") for gpu, _ in files] == [name for _, name in files]
    assert {hardware_of_machine(machine_with(gpu), "cuda") for gpu in NO_FILES} == {UNKNOWN}


every_device = pytest.mark.parametrize("name", known_hardware())
GIGABYTES = {"b200": 180, "l20": 48, "rtx_4090": 24}
"""Memory in GB of files whose name does not state it."""
NOT_NUMBERS = re.compile(r"\s*(#|name:|\w+:(  # .*)?$)")


@every_device
def test_hardware_numbers_are_complete_and_plausible(name):
    facts = known_hardware()[name]
    assert 1e14 < facts["peak_flops_per_s"] < 3e15
    assert 5e11 < facts["memory_bytes_per_s"] < 1e13
    assert 0.95 < facts["usable_bytes"] / facts["memory_bytes"] < 1
    gigabytes = GIGABYTES.get(name) or int(name.split("_")[-1][:-2])
    assert facts["memory_bytes"] == pytest.approx(gigabytes * 1e9, rel=0.08)

    node, network = facts["links"]["node"], facts["links"]["network"]
    assert network["bytes_per_s"] < node["bytes_per_s"] < facts["memory_bytes_per_s"]
    assert 1e-6 < node["latency_s"] <= network["latency_s"] < 1e-4
    assert 1e-6 < node["hop_latency_s"] < network["hop_latency_s"] <= network["latency_s"]
    rates = facts["rates"]
    forward, backward = rates["attention_forward"], rates["attention_backward"]
    hopper, blackwell = name.startswith("h"), name.startswith("b")
    newer = {"flash_attn_3": hopper, "flash_attn_4": hopper or blackwell}
    runs = {kernel for kernel in KERNEL_FACTS if newer.get(kernel, True)} - {"math", "flash_blocks"}
    assert {*forward} == {*backward} == runs
    shares = [rates[key] for key in ("matmul", "memory", "link")] + [*forward.values(), *backward.values()]
    assert all(0 < low < expected < high <= 1 for low, expected, high in shares)
    low, expected, high = facts["host_s_per_operation"]
    assert 0 < low < expected < high < 1e-4


@every_device
def test_every_hardware_number_names_its_source(name):
    lines = (CONF / "hardware" / f"{name}.yaml").read_text().splitlines()
    numbers = [line for line in lines if not NOT_NUMBERS.match(line)]
    assert len(numbers) > 15
    assert [line for line in numbers if not re.search(r"  # \S.{8,}", line)] == []


A100, H100, NO_FILE = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"
USABLE = {
    "a datasheet's": ({}, machine_with(H100), known_hardware()["h100_80gb"]["usable_bytes"]),
    "the smallest device's, as NVML counts it": ({}, machine_with(NO_FILE), 95 * GIB),
    "nothing known": ({}, replace(machine_with(NO_FILE), gpu_memory_bytes=()), None),
    "a limit below it": ({"cluster.memory_limit_gib": 20}, machine_with(H100), 20 * GIB),
    "a limit above it": ({"cluster.memory_limit_gib": 500}, machine_with(NO_FILE), 95 * GIB),
    "a shared one's part": ({"cluster.ranks_per_gpu": 4}, machine_with(NO_FILE), 95 * GIB // 4),
    "another machine's": (
        {"hardware.name": "h200_141gb", "mode": "predict"},
        machine_with(H100),
        150022914048,
    ),
    "a CPU rank's limit": ({"cluster.memory_limit_gib": 0.5}, TWO_CORES, GIB // 2),
    "no limit on a CPU": ({}, TWO_CORES, None),
}


@pytest.mark.parametrize("case", USABLE)
def test_usable_bytes_are_the_limit_or_the_share_of_the_device(case):
    values, machine, size = USABLE[case]
    assert usable_bytes(resolve(raw_with(values), machine), machine) == size


@pytest.mark.parametrize(("machine", "here"), [(TWO_CORES, "cpu"), (machine_with(A100), "a100_80gb")])
def test_absent_hardware_is_refused_unless_mode_is_predict(machine, here):
    words = {"hardware.name": "h100_80gb", "cluster.world_size": 4}
    with pytest.raises(
        ConfigError, match=rf"^hardware=h100_80gb: .* hardware={here}; add mode=predict, or leave"
    ):
        resolve(raw_with(words), machine)
    assert resolve(raw_with(words | {"mode": "predict"}), machine).cluster.device == "cuda"


def test_hardware_may_be_set_for_unknown_gpus_and_for_nodes():
    named_h100 = {"hardware.name": "h100_80gb"}
    for machine in (machine_with(H100), machine_with(NO_FILE)):
        assert resolve(raw_with(named_h100), machine).hardware == "h100_80gb"
    nodes = {"cluster": read_option("cluster", "nodes") | {"device": "cuda", "nodes": 2, "world_size": 4}}
    cell = resolve(raw_with(named_h100) | nodes, machine_with(A100))
    assert (cell.hardware, cell.cluster.nodes) == ("h100_80gb", 2)
