"""Calls of flash-attention against the recorded signatures of its functions at named commits."""

import importlib
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers.modeling_flash_attention_utils as transformers_flash
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention import flash_attn_bridge
from bench.attention.flash_attn_bridge import package_on
from bench.attention.kernels import KERNELS, Packing, kernel_forward
from bench.attention.packed import packed_backward, packed_forward
from bench.strategies import STRATEGIES, load_strategy_class
from bench.strategies.ringmaster_ring.attention import implementation_name
from bench.strategies.ringmaster_ulysses.attention import TRANSFORMERS_NAMES
from tests.support.cells import make_cell
from tests.support.recorded_signatures import (
    FLASH_ATTN_2,
    FLASH_ATTN_2_PUBLIC,
    FLASH_ATTN_3_PUBLIC,
    SOURCES,
    forget_packages,
    parameters,
    write_package,
)

OFFERED = {
    "_flash_attn_forward": flash_attn_bridge.forward_with,
    "_flash_attn_backward": flash_attn_bridge.backward_with,
    "_flash_attn_varlen_forward": flash_attn_bridge.varlen_forward_with,
    "_flash_attn_varlen_backward": flash_attn_bridge.varlen_backward_with,
}
PUBLIC = {
    "flash_attn_func": flash_attn_bridge.flash_attn_func_on,
    "flash_attn_varlen_func": flash_attn_bridge.flash_attn_varlen_func_on,
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Function that writes the package of a recorded source to a folder on the path and imports it."""

    def install(source):
        write_package(tmp_path, source)
        return importlib.import_module(source.module)

    monkeypatch.syspath_prepend(tmp_path)
    forget_packages()
    package_on.cache_clear()
    yield install
    forget_packages()
    package_on.cache_clear()


@pytest.fixture
def one_rank():
    """A process group of one rank whose collectives carry nothing."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def qkv_and_dout(dtype):
    torch.manual_seed(0)
    return [torch.randn(2, 4, 32, 16, dtype=dtype) for _ in range(4)]


@pytest.mark.parametrize("name", SOURCES)
def test_packed_kernel_calls_match_the_packages_signatures(installed, name):
    module = installed(SOURCES[name])
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(48, heads, 16) for heads in (4, 2, 2, 4))
    ends = torch.tensor([0, 10, 48], dtype=torch.int32)
    packing = Packing(ends, ends, 38, 38, causal=True, scale=0.25)
    entry = KERNELS[name].packed
    by_package, by_formula = ([torch.empty_like(x) for x in (q, k, v)] for _ in range(2))
    out, lse = entry.forward(q, k, v, packing)
    entry.backward(tuple(by_package), (dout, q, k, v, out, lse), packing)
    assert len(module.calls) == 2
    expected = packed_forward(KERNELS["math"], q, k, v, packing)
    packed_backward(KERNELS["math"], tuple(by_formula), dout, (q, k, v), *expected, packing)
    torch.testing.assert_close([out, lse, *by_package], [*expected, *by_formula])


@pytest.mark.parametrize("name", [*OFFERED, *PUBLIC])
def test_bridge_functions_have_flash_attns_parameters(name):
    required, optional = parameters((FLASH_ATTN_2.functions | FLASH_ATTN_2_PUBLIC)[name])
    offered = inspect.getfullargspec((OFFERED | PUBLIC)[name](KERNELS["math"]))
    assert offered.args == [*required, *optional][: len(offered.args)]
    assert offered.varargs
    assert offered.varkw


def test_installed_flash_attn_serves_only_its_own_kernel(installed, one_rank):
    module = installed(FLASH_ATTN_2)
    q, k, v, dout = (x.transpose(1, 2) for x in qkv_and_dout(torch.bfloat16))
    offsets = torch.tensor([0, 32], dtype=torch.int32)
    for kernel, called in (("flash_attn_2", [*OFFERED]), ("math", [])):
        package = package_on("ring_flash_attn", KERNELS[kernel])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        package.zigzag_ring_flash_attn_func(*leaves, causal=True).backward(dout)
        package.llama3_flash_attn_varlen_func(
            *(x[0] for x in leaves), offsets, offsets, 32, 32, 1, slice(0, 32), causal=True
        ).backward(dout[0])
        assert set(module.calls) == set(called)
        module.calls.clear()


def test_flash_attn_3_fills_ring_flash_attns_gradient_buffers(installed):
    installed(SOURCES["flash_attn_3"])
    q, k, v, dout = (x.transpose(1, 2) for x in qkv_and_dout(torch.float32))
    out, lse, *_ = flash_attn_bridge.forward_with(KERNELS["flash_attn_3"])(q, k, v, 0.0, 0.25, True)
    filled, copies = {}, {}
    for name in ("flash_attn_3", "math"):
        buffers = [torch.empty(2, 40, 4, 16)[:, :32] for _ in range(3)]
        backward = flash_attn_bridge.backward_with(KERNELS[name])
        with torch.profiler.profile() as profile:
            backward(dout, q, k, v, out, lse, *buffers, 0.0, 0.25, True)
        filled[name] = buffers
        copies[name] = sum(event.name == "aten::copy_" for event in profile.events())
    torch.testing.assert_close(filled["flash_attn_3"], filled["math"])
    assert (
        copies["flash_attn_3"] == copies["math"]
    )  # copies inside the fake package, which computes like `math`


WITH_PUBLIC = {
    "flash_attn_2": replace(
        FLASH_ATTN_2,
        functions=FLASH_ATTN_2.functions | FLASH_ATTN_2_PUBLIC | {"flash_attn_with_kvcache": "q |"},
    ),
    "flash_attn_3": replace(
        SOURCES["flash_attn_3"], functions=SOURCES["flash_attn_3"].functions | FLASH_ATTN_3_PUBLIC
    ),
}


@pytest.fixture
def in_transformers(installed, tmp_path, monkeypatch):
    """Function that installs flash-attn with the names that transformers imports on a machine with CUDA."""

    def install(name):
        write_package(tmp_path, WITH_PUBLIC[name])
        if name == "flash_attn_2":
            (tmp_path / "flash_attn" / "__init__.py").write_text(
                "from flash_attn.flash_attn_interface import *\n__version__ = '2.8.3'\n"
            )
            (tmp_path / "flash_attn" / "bert_padding.py").write_text("pad_input = unpad_input = None\n")
        monkeypatch.setattr(transformers_flash, "is_flash_attn_2_available", lambda: name == "flash_attn_2")
        monkeypatch.setattr(transformers_flash, "_loaded_implementation", None)
        return importlib.import_module(WITH_PUBLIC[name].module)

    return install


def test_transformers_loads_flash_attn_by_ringmasters_names(in_transformers):
    module = in_transformers("flash_attn_2")
    for rotation in ("allgather", "p2p"):
        with flash_attn_bridge.flash_attn_from(KERNELS["flash_attn_2"]):
            functions = transformers_flash._lazy_imports(implementation_name(rotation, "flash_attn_2"))
        assert functions[:2] == (module.flash_attn_func, module.flash_attn_varlen_func)
    assert TRANSFORMERS_NAMES["flash_attn_2"] in ALL_ATTENTION_FUNCTIONS
    assert implementation_name("allgather", "torch_flash") not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("name", "kernel", "called"),
    [
        ("ringmaster_ulysses", "flash_attn_2", "flash_attn_func"),
        ("ringmaster_ring", "flash_attn_2", "flash_attn_func"),
        ("ringmaster_ulysses", "flash_attn_3", "_flash_attn_forward"),
        ("ringmaster_ring", "flash_attn_3", "_flash_attn_forward"),
        ("yunchang_ulysses", "flash_attn_2", "flash_attn_func"),
        ("yunchang_ulysses", "flash_attn_3", "flash_attn_func"),
    ],
)
def test_packages_call_flash_attn_with_valid_arguments(in_transformers, one_rank, name, kernel, called):
    """ringmaster passes `dropout_p`, so that it calls FlashAttention-3 through the stand-in."""
    facts = STRATEGIES[name]
    pytest.importorskip(facts.package.removeprefix("axolotl-"))
    forget_packages()
    module = in_transformers(kernel)
    cell = replace(make_cell(f"strategy={name}", "cluster.world_size=1", "model=qwen3_nano"), kernel=kernel)
    one = dist.group.WORLD
    strategy = load_strategy_class(name)(cell, SimpleNamespace(sequence=one, ulysses=one, ring=one), facts)
    q, k, v, _ = qkv_and_dout(torch.bfloat16)
    found = strategy.attention(q, k, v)
    expected, _ = kernel_forward(KERNELS["math"], q, k, v, causal=True, scale=q.shape[-1] ** -0.5)
    torch.testing.assert_close(found, expected)
    assert module.calls == [called]
