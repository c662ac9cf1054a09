"""A package that is missing, broken or of another version makes its own strategies unsupported, no others."""

import json
from unittest.mock import Mock

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.kernels import KERNELS
from bench.environment import installed
from bench.ranks.log import RefusedError
from bench.request.legality import refusal
from bench.strategies import STRATEGIES, runnable, shipped
from tests.cells import TINY, make_cell, words_for
from tests.command import typed

OPTIONAL = {facts.name: facts for facts in STRATEGIES.values() if facts.is_optional}
MODULES = {"axolotl-ringmaster": "ringmaster", "yunchang": "yunchang"}
BROKEN = {
    "yunchang": ("raise RuntimeError('no part of it here')", "RuntimeError: no part of it here ("),
    "axolotl-ringmaster": ("__version__ = '9.9'", "ImportError: cannot import name 'runtime'"),
}
"""A module that cannot be imported, and one of another version; and what is said of them."""


def lay_out(folder, package, code):
    """A package as an installer leaves it: one module, and metadata that say version 9.9."""
    (folder / f"{MODULES[package]}.py").write_text(code)
    metadata = folder / f"{package.replace('-', '_')}-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_its_package_a_strategy_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    facts = OPTIONAL[name]
    monkeypatch.setattr("bench.request.legality.installed", lambda package: None)
    reason = refusal(make_cell(f"strategy={name}", "engine=ddp", "cluster.world_size=2", *words_for(name)))
    assert f"strategy={name} needs the package {facts.package}; " in reason
    assert f"pip install {facts.package}=={facts.tried}" in reason


@pytest.mark.parametrize("package", MODULES)
def test_the_version_that_was_tried_is_the_one_that_the_extra_installs(package, pytestconfig):
    tried = {facts.tried for facts in OPTIONAL.values() if facts.package == package}
    (version,) = tried
    assert f'["{package}=={version}"]' in (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert installed(package) in (None, version)


@pytest.mark.slow
@pytest.mark.ranks
def test_beside_broken_packages_their_strategies_are_unsupported_and_ours_run(tmp_path):
    for package, (code, _) in BROKEN.items():
        lay_out(tmp_path, package, code)
    names = ("ring", "ringmaster_ring", "yunchang_ring")
    words = ("cluster=cpu", "cluster.world_size=2", "engine=fsdp2", f"strategy={','.join(names)}")
    done = typed(tmp_path, "-m", *TINY, *words, "sweep_dir=out", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    found = {record["config"]["strategy"]: record for record in map(json.loads, lines)}
    assert [found[name]["status"] for name in names] == ["ok", "unsupported", "unsupported"]
    for name in names[1:]:
        facts, reason = OPTIONAL[name], found[name]["reason"]
        said = f"the package {facts.package} 9.9 cannot be used: {BROKEN[facts.package][1]}"
        assert f"strategy={name}: {said}" in reason
        assert reason.endswith(f"the version that was tried: {facts.install}")


def test_deepspeed_packs_one_sequence_at_a_time():
    """transformers looks for boundaries in no larger batch."""
    words = ("strategy=deepspeed_ulysses", "data.packing=documents", "cluster.world_size=2", "batch=2")
    assert "with batch=2 is not for deepspeed_ulysses" in refusal(make_cell(*words))
    assert refusal(make_cell(*words[:-1])) is None


UNDEFINED = "undefined symbol: _ZN3c105ErrorC2E"


def broken(name):
    raise ImportError(UNDEFINED)


@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if kernel.module])
def test_a_kernel_whose_wheel_is_for_another_torch_is_refused_where_it_is_chosen(kernel, monkeypatch):
    monkeypatch.setattr(shipped.importlib, "import_module", broken)
    with pytest.raises(RefusedError, match=UNDEFINED) as raised:
        shipped.usable_kernel(kernel)
    assert f"kernel={kernel}: the package {KERNEL_FACTS[kernel].package}" in str(raised.value)
    assert "take kernel=torch_flash" in str(raised.value)


@pytest.mark.parametrize("name", ["ring_flash_attn", "ring_flash_attn_llama3"])
def test_ring_flash_attn_that_cannot_be_imported_is_refused(name, monkeypatch):
    code = runnable(name)
    monkeypatch.setattr(f"{code.__module__}.package_on", lambda *_: broken("ring_flash_attn"))
    cell = make_cell(f"strategy={name}", "cluster.world_size=2")
    with pytest.raises(RefusedError, match=f"strategy={name}: the package ring-flash-attn .* {UNDEFINED}"):
        code(cell, Mock(), STRATEGIES[name])
