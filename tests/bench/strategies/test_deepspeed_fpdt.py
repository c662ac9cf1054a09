"""FPDT's operator, its arguments and its defaults are those of the package."""

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
    """The module of the package that has the operators."""
    return package_on("deepspeed.sequence.fpdt_layer", KERNELS["torch_flash"])


def fpdt(*words, machine=FOUR_H100):
    return make_cell(
        "strategy=deepspeed_fpdt", "kernel=torch_flash", "model=qwen3_8b", *words, machine=machine
    )


@pytest.mark.parametrize(
    ("words", "chunks", "offload", "name"),
    [
        (("seq_len=64k",), 1, "true", PLAIN),
        (("seq_len=128k",), 2, "true", OFFLOADING),
        (("seq_len=512k", "strategy.offload=false"), 8, "false", PLAIN),
        (("seq_len=512k", "strategy.chunks=2"), 2, "true", OFFLOADING),
    ],
)
def test_gpu_cells_use_the_chunks_and_operator_of_the_package(
    monkeypatch, layer, words, chunks, offload, name
):
    """Nothing runs on a GPU; the arguments are bound to the operator's signature."""
    cell = fpdt(*words)
    assert (cell.number("chunks"), cell.option("offload")) == (chunks, offload)
    monkeypatch.setattr(attention, "join_deepspeed", lambda _: None)
    strategy = attention.STRATEGY(cell, SimpleNamespace(sequence="group"), STRATEGIES["deepspeed_fpdt"])
    assert strategy.operation is getattr(layer, name)
    calls = []
    strategy.operation = SimpleNamespace(apply=lambda *values: calls.append(values) or values[0][None])
    strategy.attention(*(torch.zeros(1, heads, 8, 4) for heads in (4, 2, 2)))
    bound = inspect.signature(getattr(layer, name).forward).bind(None, *calls[0]).arguments
    assert (bound["num_chunks"], bound["cpu_offloading"], bound["spg"]) == (chunks, offloads(cell), "group")


def test_default_chunk_size_and_offload_match_the_package(layer):
    defaults = inspect.signature(layer.FPDT_Attention.__init__).parameters
    assert defaults["chunk_size"].default == CHUNK_TOKENS
    assert inspect.signature(layer.FPDT_Attention.forward).parameters["cpu_offloading"].default is True


def test_offload_needs_a_gpu_and_saves_nothing_on_it():
    on_cpu = make_cell("strategy=deepspeed_fpdt", "strategy.offload=true", "seq_len=1k", machine=TWO_CORES)
    assert "strategy.offload=true is not for deepspeed_fpdt on CPU ranks" in refusal(on_cpu)
    assert "take strategy.offload=false" in refusal(on_cpu)
    usual = make_cell("strategy=deepspeed_fpdt", "seq_len=1k", machine=TWO_CORES)
    assert (usual.number("chunks"), usual.option("offload"), refusal(usual)) == (4, "false", None)
    saved = [
        STRATEGIES["deepspeed_fpdt"].saved_bytes_per_token(
            fpdt("seq_len=128k", f"strategy.offload={offload}")
        )
        for offload in ("true", "false")
    ]
    assert saved[0] == 0 < saved[1]
