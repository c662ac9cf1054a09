"""The house stands as designed: imports run one way, tables and folders agree."""

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
from bench.measure.workloads import WORKLOADS, workload_code
from bench.measure.workloads.workload import Workload
from bench.request import resolve
from bench.request.choices import CONF, option_of, read_option
from bench.request.model_numbers import FAMILIES as FAMILY_WORDS
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
LAYERS = {each["containers"][0]: each["layers"] for each in CONTRACTS if each["type"] == "layers"}
BELOW = {
    f"{package}.{room}": {*words(" ".join(layers[number + 1 :]))}
    for package, layers in LAYERS.items()
    for number, layer in enumerate(layers)
    for room in words(layer)
}
"""The rooms below each room, by the contract that orders it."""
PACKAGES = [name for name in BELOW if (REPOSITORY / name.replace(".", "/")).is_dir()]


def test_a_contract_names_all_that_it_is_about():
    """`lint-imports` holds what they say."""
    assert not [contract for contract in CONTRACTS if "ignore_imports" in contract]
    by_id = {contract["id"]: contract for contract in CONTRACTS}
    forbidden = {*by_id["records"]["forbidden_modules"]}
    packages = {f"bench.{path.parent.name}" for path in REPOSITORY.glob("bench/*/__init__.py")}
    allowed = {"bench.common", "bench.cost", "bench.measure", "bench.record", "bench.strategies"}
    assert packages - forbidden == allowed


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_may_import_and_the_contract_agrees(package):
    said = ast.get_docstring(ast.parse((REPOSITORY / package.replace(".", "/") / "__init__.py").read_text()))
    allowed = re.search(r"May\s+import\s+(.+?)[.;]", said, re.DOTALL)[1]
    parent = package.rpartition(".")[0]
    rooms = {name.removeprefix(f"{parent}.") for name in BELOW}
    assert rooms & {*words(allowed)} <= BELOW[package]
    assert rooms & {*words(allowed)} or allowed == f"what lies below {parent.split('.')[-1]}"


def test_modules_inside_never_import_what_is_for_those_outside():
    """An import from `bench` itself would hide which room the arrow points to."""
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


def test_what_plans_launches_and_reports_never_imports_torch():
    command = [sys.executable, "-c", IMPORT_IN_TURN, *TORCH_FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def names(group):
    return {path.stem for path in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize(
    ("group", "table"),
    [
        ("strategy", STRATEGIES.ours),
        ("engine", ENGINE_FACTS),
        ("optimizer", OPTIMIZER_FACTS),
        ("trainer", TRAINER_FACTS),
        ("data", SOURCES),
        ("workload", WORKLOADS),
    ],
)
def test_every_table_has_its_yaml_and_every_yaml_its_entry(group, table):
    assert names(group) - {AUTO} == set(table)


@pytest.mark.parametrize(
    "path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_choice_is_named_as_its_file_is(path):
    if path.parent.name != "measure":
        content = yaml.safe_load(path.read_text())
        assert content.get(path.parent.name, content)["name"] == path.stem


def test_words_that_are_checked_without_torch_are_those_of_the_tables_with_it():
    assert list(KERNEL_FACTS) == list(KERNELS)
    assert DEFAULT_KERNEL in KERNELS
    assert (set(resolve.DATA), set(resolve.LOSSES)) == (set(SOURCES), set(LOSSES))
    assert all(issubclass(trainer_code(name), Trainer) for name in TRAINER_FACTS)
    assert all(issubclass(engine_code(name), Engine) for name in ENGINE_FACTS)
    assert all(issubclass(workload_code(name), Workload) for name in WORKLOADS)
    assert set(WORKLOADS) == set(ANALYTIC_FLOPS)
    assert set(FAMILY_WORDS) == set(FAMILIES)


@pytest.mark.parametrize("name", STRATEGIES.ours)
def test_a_strategys_file_names_the_first_of_each_of_its_own_choices(name):
    assert read_option("strategy", name) == option_of(STRATEGIES[name])
