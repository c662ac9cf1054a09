"""The house stands as designed: imports run one way, tables and folders agree."""

import subprocess
import sys

import pytest
import yaml

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.attention.kernels import KERNELS
from bench.cell.outcome import ANALYTIC_FLOPS
from bench.request.choices import CONF, option_of, read_option
from bench.request.legality import ENGINE_DTYPES
from bench.request.model_numbers import FAMILIES as FAMILY_WORDS
from bench.request.resolve import ENGINES as ENGINE_WORDS
from bench.request.resolve import LOSSES as LOSS_WORDS
from bench.request.resolve import WORKLOADS as WORKLOAD_WORDS
from bench.strategies import STRATEGIES, runnable
from bench.training.data import SOURCES
from bench.training.engines import ENGINES
from bench.training.loss import LOSSES
from bench.training.models import FAMILIES
from bench.training.trainers import TRAINERS
from bench.workloads import WORKLOADS

TORCH_FREE = [
    "bench.sweep.run", "bench.cell.run", "bench.passes", "bench.cell.launcher",
    "bench.request.resolve", "bench.request.legality", "bench.store", "bench.strategies",
    "bench.attention.kernel_facts", "bench.cost.flops", "bench.sweep.progress", "analysis.report",
    "run_sweep",
]  # fmt: skip


@pytest.mark.parametrize("module", TORCH_FREE)
def test_what_plans_launches_and_reports_never_imports_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def names(group):
    return {path.stem for path in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize(
    ("group", "table"),
    [
        ("strategy", STRATEGIES.ours),
        ("engine", ENGINES),
        ("trainer", TRAINERS),
        ("data", SOURCES),
        ("workload", WORKLOADS),
    ],
)
def test_every_table_has_its_yaml_and_every_yaml_its_entry(group, table):
    assert names(group) == set(table)


@pytest.mark.parametrize(
    "path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_choice_is_named_as_its_file_is(path):
    if path.parent.name != "measure":
        content = yaml.safe_load(path.read_text())
        assert content.get(path.parent.name, content)["name"] == path.stem


def test_words_that_are_checked_without_torch_are_those_of_the_tables_with_it():
    assert set(ENGINE_WORDS) == set(ENGINES) == set(ENGINE_DTYPES)
    assert list(KERNEL_FACTS) == list(KERNELS)
    assert DEFAULT_KERNEL in KERNELS
    assert set(LOSS_WORDS) == set(LOSSES)
    assert set(WORKLOAD_WORDS) == set(WORKLOADS) == set(ANALYTIC_FLOPS)
    assert set(FAMILY_WORDS) == set(FAMILIES)


@pytest.mark.parametrize("name", STRATEGIES.ours)
def test_a_strategys_file_names_the_first_of_each_of_its_own_choices(name):
    assert read_option("strategy", name) == option_of(STRATEGIES[name])


@pytest.mark.parametrize("name", STRATEGIES.ours)
def test_a_strategy_lives_in_the_folder_of_its_name(name):
    assert type(STRATEGIES[name]).__module__ == f"bench.strategies.{name}.facts"
    assert runnable(name).__module__ == f"bench.strategies.{name}.attention"


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_lives_in_the_file_of_its_name(name):
    for function in (KERNELS[name].forward, KERNELS[name].backward):
        assert function.__module__ == f"bench.attention.kernels.{name}"
