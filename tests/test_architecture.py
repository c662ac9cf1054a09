"""Imports follow the layers of pyproject.toml, and tables agree with YAML files."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.attention.kernels import KERNELS
from bench.common.environment import REPOSITORY
from bench.config import AUTO
from bench.measure.workloads import WORKLOADS, load_workload_class
from bench.measure.workloads.workload import Workload
from bench.request import resolve
from bench.request.choices import CONF, read_option, strategy_content
from bench.request.layer_types import PLAIN_FAMILIES
from bench.run.cell.outcome import ANALYTIC_FLOPS
from bench.strategies import STRATEGIES
from bench.training.data import SOURCES
from bench.training.engines import ENGINE_FACTS, engine_code
from bench.training.engines.engine import Engine
from bench.training.loss import LOSSES
from bench.training.models import FAMILIES
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.trainer_facts import TRAINER_FACTS
from bench.training.trainers import trainer_code
from bench.training.trainers.trainer import Trainer

TORCH_FREE = [
    "bench.run.sweep", "bench.run.cell.run", "bench.measure", "bench.run.cell.launcher",
    "bench.request.resolve", "bench.request.legality", "bench.record.store", "bench.strategies",
    "bench.attention.kernel_facts", "bench.cost.flops", "bench.run.progress",
    "analysis.report", "run_sweep",
]  # fmt: skip


def words(text):
    return re.findall(r"\w+", text)


CONTRACTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = {
    contract["containers"][0]: contract["layers"] for contract in CONTRACTS if contract["type"] == "layers"
}
BELOW = {
    f"{package}.{folder}": {*words(" ".join(layers[number + 1 :]))}
    for package, layers in LAYERS.items()
    for number, layer in enumerate(layers)
    for folder in words(layer)
}
"""Folders below each folder, by the contract that orders it."""
PACKAGES = [name for name in BELOW if (REPOSITORY / name.replace(".", "/")).is_dir()]


def test_import_contracts_name_all_packages():
    """`lint-imports` checks the contracts themselves."""
    assert not [contract for contract in CONTRACTS if "ignore_imports" in contract]
    by_id = {contract["id"]: contract for contract in CONTRACTS}
    forbidden = {*by_id["records"]["forbidden_modules"]}
    packages = {f"bench.{path.parent.name}" for path in REPOSITORY.glob("bench/*/__init__.py")}
    allowed = {"bench.common", "bench.cost", "bench.measure", "bench.record", "bench.strategies"}
    assert packages - forbidden == allowed


@pytest.mark.parametrize("package", PACKAGES)
def test_package_docstring_agrees_with_its_import_contract(package):
    docstring = ast.get_docstring(
        ast.parse((REPOSITORY / package.replace(".", "/") / "__init__.py").read_text())
    )
    allowed = re.search(r"May\s+import\s+(.+?)[.;]", docstring, re.DOTALL)[1]
    parent = package.rpartition(".")[0]
    folders = {name.removeprefix(f"{parent}.") for name in BELOW}
    assert folders & {*words(allowed)} <= BELOW[package]
    assert folders & {*words(allowed)} or allowed == f"what lies below {parent.split('.')[-1]}"


def test_modules_do_not_import_from_the_public_package():
    """An import from `bench` itself would hide the folder that is imported."""
    inside = [path for root in ("bench", "analysis") for path in REPOSITORY.glob(f"{root}/**/*.py")]
    assert not [
        path
        for path in inside
        if re.search(r"^\s*(from bench import|import bench$)", path.read_text(), re.MULTILINE)
    ]


IMPORT_IN_TURN = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""


def test_planning_launching_and_reporting_import_no_torch():
    command = [sys.executable, "-c", IMPORT_IN_TURN, *TORCH_FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def names(group):
    return {path.stem for path in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize(
    ("group", "table"),
    [
        ("strategy", STRATEGIES.built_in),
        ("engine", ENGINE_FACTS),
        ("optimizer", OPTIMIZER_FACTS),
        ("trainer", TRAINER_FACTS),
        ("data", SOURCES),
        ("workload", WORKLOADS),
    ],
)
def test_tables_and_yaml_files_have_the_same_names(group, table):
    assert names(group) - {AUTO} == set(table)


@pytest.mark.parametrize(
    "path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_yaml_file_name_equals_its_name_key(path):
    if path.parent.name != "measure":
        content = yaml.safe_load(path.read_text())
        assert content.get(path.parent.name, content)["name"] == path.stem


def test_names_without_torch_equal_those_of_tables_with_torch():
    assert list(KERNEL_FACTS) == list(KERNELS)
    assert DEFAULT_KERNEL in KERNELS
    assert (set(resolve.DATA), set(resolve.LOSSES)) == (set(SOURCES), set(LOSSES))
    assert all(issubclass(trainer_code(name), Trainer) for name in TRAINER_FACTS)
    assert all(issubclass(engine_code(name), Engine) for name in ENGINE_FACTS)
    assert all(issubclass(load_workload_class(name), Workload) for name in WORKLOADS)
    assert set(WORKLOADS) == set(ANALYTIC_FLOPS)
    assert set(PLAIN_FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("name", STRATEGIES.built_in)
def test_strategy_file_equals_the_defaults_of_its_facts(name):
    assert read_option("strategy", name) == strategy_content(STRATEGIES[name])
