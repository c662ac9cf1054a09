"""FPDT's operators are chosen and called as the package does it."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from bench.attention.flash_attn_bridge import package_on
from bench.attention.kernels import KERNELS
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from bench.strategies.deepspeed_fpdt import attention
from bench.strategies.deepspeed_fpdt.facts import CHUNK_TOKENS, offloads
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell

PLAIN, OFFLOADING = "_FPDTGPUAttentionImpl_", "_FPDTGPUOffloadingAttentionImpl_"


@pytest.fixture(scope="module")
def layer():
    """The package's module."""
    return package_on("deepspeed.sequence.fpdt_layer", KERNELS["torch_flash"])


def fpdt(*words, machine=FOUR_H100):
    return make_cell("strategy=deepspeed_fpdt", "model=qwen3_8b", *words, machine=machine)


@pytest.mark.parametrize(
    ("words", "chunks", "offload", "name"),
    [
        (("seq_len=64k",), 1, "true", PLAIN),
        (("seq_len=128k",), 2, "true", OFFLOADING),
        (("seq_len=512k", "strategy.offload=false"), 8, "false", PLAIN),
        (("seq_len=512k", "strategy.chunks=2"), 2, "true", OFFLOADING),
    ],
)
def test_a_gpu_takes_the_packages_chunks_and_operator(monkeypatch, layer, words, chunks, offload, name):
    """Not run on a GPU: the operator is only asked whether it takes these arguments."""
    cell = fpdt(*words)
    assert (cell.number("chunks"), cell.option("offload")) == (chunks, offload)
    monkeypatch.setattr(attention, "join_deepspeed", lambda _: None)
    strategy = attention.STRATEGY(cell, SimpleNamespace(sequence="group"), STRATEGIES["deepspeed_fpdt"])
    assert strategy.operation is getattr(layer, name)
    called = []
    strategy.operation = SimpleNamespace(apply=lambda *given: called.append(given) or given[0][None])
    strategy.attention(*(torch.zeros(1, heads, 8, 4) for heads in (4, 2, 2)))
    given = inspect.signature(getattr(layer, name).forward).bind(None, *called[0]).arguments
    assert (given["num_chunks"], given["cpu_offloading"], given["spg"]) == (chunks, offloads(cell), "group")


def test_the_package_still_cuts_and_offloads_by_these_defaults(layer):
    defaults = inspect.signature(layer.FPDT_Attention.__init__).parameters
    assert defaults["chunk_size"].default == CHUNK_TOKENS
    assert inspect.signature(layer.FPDT_Attention.forward).parameters["cpu_offloading"].default is True


def test_only_a_gpu_offloads_and_keeps_nothing_on_it_for_backward():
    on_cpu = make_cell("strategy=deepspeed_fpdt", "strategy.offload=true", "seq_len=1k", machine=TWO_CORES)
    assert "strategy.offload=true is not for deepspeed_fpdt on CPU ranks" in refusal(on_cpu)
    assert "take strategy.offload=false" in refusal(on_cpu)
    usual = make_cell("strategy=deepspeed_fpdt", "seq_len=1k", machine=TWO_CORES)
    assert (usual.number("chunks"), usual.option("offload"), refusal(usual)) == (4, "false", None)
    kept = [
        STRATEGIES["deepspeed_fpdt"].kept_bytes_per_token(fpdt("seq_len=128k", f"strategy.offload={each}"))
        for each in ("true", "false")
    ]
    assert kept[0] == 0 < kept[1]
