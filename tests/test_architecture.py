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
from bench.cell.outcome import ANALYTIC_FLOPS
from bench.config import AUTO
from bench.cost.engine_memory import OPTIMIZER_MOMENTS
from bench.environment import REPOSITORY
from bench.request import resolve
from bench.request.choices import CONF, option_of, read_option
from bench.request.legality import ENGINE_DTYPES
from bench.request.model_numbers import FAMILIES as FAMILY_WORDS
from bench.strategies import STRATEGIES
from bench.training.data import SOURCES
from bench.training.engines import ENGINES
from bench.training.loss import LOSSES
from bench.training.models import FAMILIES
from bench.training.optimizer import OPTIMIZERS
from bench.training.trainer_facts import TRAINER_FACTS
from bench.training.trainers import trainer_code
from bench.training.trainers.trainer import Trainer
from bench.workloads import WORKLOADS

TORCH_FREE = [
    "bench.sweep.run", "bench.cell.run", "bench.passes", "bench.cell.launcher",
    "bench.request.resolve", "bench.request.legality", "bench.store", "bench.strategies",
    "bench.attention.kernel_facts", "bench.cost.flops", "bench.sweep.progress",
    "analysis.report", "run_sweep",
]  # fmt: skip

CONTRACTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = {contract["id"]: contract["layers"] for contract in CONTRACTS if contract["type"] == "layers"}
LAYER_OF = {
    root: {name: number for number, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    for root, layers in LAYERS.items()
}
PACKAGES = [
    str(path.parent.relative_to(REPOSITORY))
    for root in LAYERS
    for path in REPOSITORY.glob(f"{root}/*/__init__.py")
]


def test_a_contract_names_all_that_it_is_about():
    """`lint-imports` holds what they say."""
    assert not [contract for contract in CONTRACTS if "ignore_imports" in contract]
    by_id = {contract["id"]: contract for contract in CONTRACTS}
    forbidden = {*by_id["records"]["forbidden_modules"]}
    packages = {f"bench.{path.parent.name}" for path in REPOSITORY.glob("bench/*/__init__.py")}
    assert packages - forbidden == {"bench.cost", "bench.strategies"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_may_import_and_the_contract_agrees(package):
    root, name = package.split("/")
    said = ast.get_docstring(ast.parse((REPOSITORY / package / "__init__.py").read_text()))
    allowed = re.search(r"May\s+import\s+(.+?)[.;]", said, re.DOTALL)[1]
    layers = {LAYER_OF[root][word] for word in re.findall(r"\w+", allowed) if word in LAYER_OF[root]}
    assert all(layer > LAYER_OF[root][name] for layer in layers)
    assert layers or allowed == "the nouns only"


def test_modules_inside_never_import_what_is_for_those_outside():
    """An import from `bench` itself would hide which room the arrow points to."""
    inside = [path for root in LAYERS for path in REPOSITORY.glob(f"{root}/**/*.py")]
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
        ("engine", ENGINES),
        ("optimizer", OPTIMIZERS),
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
    assert set(resolve.ENGINES) == set(ENGINES) == set(ENGINE_DTYPES)
    assert list(KERNEL_FACTS) == list(KERNELS)
    assert DEFAULT_KERNEL in KERNELS
    assert set(resolve.DATA) == set(SOURCES)
    assert set(resolve.OPTIMIZERS) == set(OPTIMIZERS) == set(OPTIMIZER_MOMENTS)
    assert set(resolve.LOSSES) == set(LOSSES)
    assert all(issubclass(trainer_code(name), Trainer) for name in TRAINER_FACTS)
    assert set(resolve.WORKLOADS) == set(WORKLOADS) == set(ANALYTIC_FLOPS)
    assert set(FAMILY_WORDS) == set(FAMILIES)


@pytest.mark.parametrize("name", STRATEGIES.ours)
def test_a_strategys_file_names_the_first_of_each_of_its_own_choices(name):
    assert read_option("strategy", name) == option_of(STRATEGIES[name])
