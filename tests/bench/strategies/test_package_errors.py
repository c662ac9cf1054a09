"""Errors of a missing, broken or unsupported package make the cells of its own strategies unsupported."""

import sys
from unittest.mock import Mock

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.kernels import KERNELS
from bench.common.environment import installed_version
from bench.ranks.log import RefusedError
from bench.request.legality import refusal
from bench.strategies import STRATEGIES, load_strategy_class, package_errors
from tests.support.cells import make_cell, words_for

OPTIONAL = {facts.name: facts for facts in STRATEGIES.values() if facts.tested_version}


@pytest.mark.parametrize("name", OPTIONAL)
def test_missing_package_is_refused_with_the_install_command(name, monkeypatch):
    facts = OPTIONAL[name]
    monkeypatch.setattr("bench.request.packages.installed_version", lambda package: None)
    reason = refusal(make_cell(f"strategy={name}", "engine=ddp", "cluster.world_size=2", *words_for(name)))
    assert f"strategy={name} needs the package {facts.package}; " in reason
    assert f"pip install {facts.package}=={facts.tested_version}" in reason


@pytest.mark.parametrize("package", ["axolotl-ringmaster", "yunchang"])
def test_tested_version_is_the_version_that_the_extra_installs(package, pytestconfig):
    versions = {facts.tested_version for facts in OPTIONAL.values() if facts.package == package}
    (version,) = versions
    assert f'["{package}=={version}"]' in (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert installed_version(package) in (None, version)


def test_deepspeed_ulysses_takes_documents_at_batch_one_only():
    """transformers looks for document boundaries in a batch of one sequence only."""
    words = ("strategy=deepspeed_ulysses", "data.packing=documents", "cluster.world_size=2", "batch=2")
    assert "with batch=2 is not for deepspeed_ulysses" in refusal(make_cell(*words))
    assert refusal(make_cell(*words[:-1])) is None


UNDEFINED = "undefined symbol: _ZN3c105ErrorC2E"


@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if kernel.module])
def test_import_kernel_refuses_a_wheel_for_another_torch(kernel, monkeypatch):
    monkeypatch.setattr(package_errors.importlib, "import_module", Mock(side_effect=ImportError(UNDEFINED)))
    with pytest.raises(RefusedError, match=UNDEFINED) as raised:
        package_errors.import_kernel(kernel)
    assert f"kernel={kernel}: the package {KERNEL_FACTS[kernel].package}" in str(raised.value)
    assert "take kernel=torch_flash" in str(raised.value)


@pytest.mark.parametrize("name", [*OPTIONAL, "ring_flash_attn", "ring_flash_attn_llama3"])
def test_strategy_whose_package_cannot_be_imported_is_refused(name, monkeypatch):
    package_on = f"{load_strategy_class(name).__module__}.package_on"
    monkeypatch.setattr(package_on, Mock(side_effect=ImportError(UNDEFINED)), raising=False)
    monkeypatch.setitem(sys.modules, "ringmaster", None)
    cell, facts = make_cell(f"strategy={name}", "cluster.world_size=2", *words_for(name)), STRATEGIES[name]
    refusal_text = f"strategy={name}: the package {facts.package} .* cannot be used: .*Error: .*; install"
    with pytest.raises(RefusedError, match=refusal_text) as raised:
        load_strategy_class(name)(cell, Mock(), facts)
    assert str(raised.value).endswith(f": {facts.install_command}")
