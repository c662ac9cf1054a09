"""The memory estimate against torch's saved tensors and against measured cells."""

import json
import re
import statistics
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.common.environment import REPOSITORY
from bench.config import DTYPE_BYTES
from bench.cost.memory import (
    CHUNK_ROWS,
    FORMULA_SHARE,
    communication_bytes,
    layer_bytes_per_token,
    memory_need,
)
from bench.ranks.groups import make_groups
from bench.ranks.log import StepPhase
from bench.request.choices import read_option
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES, load_strategy_class
from bench.training.activation_memory import tile_mlps
from bench.training.engines.zero3.facts import REDUCE_BUCKET
from bench.training.loss import CHUNK_TOKENS, ModelWithLoss
from bench.training.models import TORCH_DTYPES, build_model
from bench.training.parameters import parameters
from tests.support.cells import FOUR_H100, INSTALLED, TWO_CORES, raw_with

WIDTHS = {
    "model.hidden_size": 48, "model.intermediate_size": 136, "model.num_heads": 8, "model.num_kv_heads": 2,
    "model.head_dim": 16, "model.vocab_size": 32,
}  # fmt: skip
"""Sizes that differ from one another and from sums of one another."""


def cell_with(values, machine=TWO_CORES):
    """Cell of `local` on the nano model with these values."""
    model = read_option("model", "qwen3_nano")
    return resolve(raw_with({"strategy": {"name": "local"}, "model": model} | values), machine)


@pytest.fixture
def rank_of():
    """Function that makes this process the last rank of a fake group; only shapes are right."""

    def make(cell):
        dist.init_process_group(
            "fake", rank=cell.cluster.world_size - 1, world_size=cell.cluster.world_size, store=FakeStore()
        )
        return make_groups(cell)

    yield make
    dist.destroy_process_group()


def saved_bytes(cell, groups, *, layers):
    """Bytes that torch saves for one micro-step's backward, counting each storage once and no parameters."""
    cell = replace(cell, model=replace(cell.model, num_layers=layers))
    strategy = load_strategy_class(cell.strategy)(cell, groups, STRATEGIES[cell.strategy])
    is_autocast, before = cell.engine.name == "ddp" and cell.dtype == "bf16", torch.get_default_dtype()
    with strategy.install() as wiring:
        torch.set_default_dtype(torch.float32 if is_autocast else TORCH_DTYPES[cell.dtype])
        model = build_model(
            cell.model, attention_name=wiring.attention_name, max_positions=cell.seq_len, seed=0
        )
        torch.set_default_dtype(before)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        saved = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = tensor  # referenced, so that its address is not reused
            return tensor

        if cell.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if cell.tiled_mlp:
            tile_mlps(model)
        model.train()
        ids = torch.zeros(1, cell.shard_len, dtype=torch.long)
        positions = torch.arange(cell.shard_len)[None]
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_autocast)
        with saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            ModelWithLoss(model, "chunked", StepPhase())(ids, ids, positions)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


NOT_FAKED = ("local", "torch_cp", "deepspeed_fpdt")
"""Strategies that are left out: the first cases are of `local`, collectives of `torch_cp` return tensors
without a storage in a fake group, and `deepspeed_fpdt` keeps tensors where torch's hooks do not see them."""
SAVED = {
    "qwen3": {},
    "llama in float32": {"dtype": "fp32", "model.family": "llama"},
    "under autocast": {"engine.name": "ddp"},
    "float64": {"dtype": "fp64", "engine.name": "fsdp2", "model.family": "qwen2"},
    "tiled MLP": {"tiled_mlp": True},
    "only inputs": {"checkpointing": True},
    "only inputs, under autocast": {"checkpointing": True, "engine.name": "ddp"},
    "ulysses with repeated KV heads": {"strategy": {"name": "ulysses"}, "cluster.world_size": 4},
    **{name: {"strategy": read_option("strategy", name)} for name in INSTALLED if name not in NOT_FAKED},
    **{
        f"{name} 2 x 2": {"strategy": read_option("strategy", name), "cluster.world_size": 4}
        for name in ("usp", "ringmaster_usp", "yunchang_usp")
        if name in INSTALLED
    },
    **{
        f"{name} p2p": {"strategy": read_option("strategy", name) | {"rotation": "p2p"}, "kernel": "math"}
        for name in ("ringmaster_ring",)
        if name in INSTALLED
    },
}


@pytest.mark.parametrize("case", SAVED)
def test_layer_bytes_per_token_match_torchs_saved_tensors(rank_of, case):
    """Compare two layers with one; the rest is the same for both lengths, as it is not per token."""
    groups, rest = None, {}
    for shard_len in (128, 256):
        cell = cell_with(WIDTHS | SAVED[case])
        cell = replace(cell, seq_len=shard_len * cell.sp_degree)
        groups = groups or rank_of(cell)
        rest[shard_len] = saved_bytes(cell, groups, layers=2) - saved_bytes(cell, groups, layers=1)
        stream = 4 if cell.engine.name == "ddp" else DTYPE_BYTES[cell.dtype]
        expected = stream * cell.model.hidden_size if cell.checkpointing else layer_bytes_per_token(cell)
        rest[shard_len] -= shard_len * expected
    assert rest[256] == rest[128]


def test_chunk_rows_equal_the_losss_chunk_tokens():
    assert CHUNK_ROWS == CHUNK_TOKENS


@pytest.fixture
def bf16_instructions(monkeypatch):
    """bf16 instructions, as on the CPU of the reference records."""
    monkeypatch.setattr("bench.cost.memory.estimated_bf16_instructions", lambda: True)


FOLDERS = ("cpu", "loss_equivalence")
SAME_KEYS = (
    "seq_len", "dtype", "loss", "checkpointing", "grad_accum", "layout", "kernel", "sp_degree", "dp_shard",
    "cluster.world_size", "model.num_layers", "model.hidden_size", "model.intermediate_size",
    "model.head_dim", "model.vocab_size", "tiled_mlp", "offload.optimizer", "offload.activations",
)  # fmt: skip
PAGE = REPOSITORY / "docs" / "published_memory.md"


def formula_errors(monkeypatch):
    """Relative error of the formula for each peak of the reference records."""
    for folder in FOLDERS:
        lines = (REPOSITORY / "results" / "reference" / folder / "records.jsonl").read_text().splitlines()
        for record in map(json.loads, lines):
            if record["status"] != "ok" or not record["memory"]:
                continue
            config, peak = record["config"], max(record["memory"]["peak_allocated_bytes"])
            values = {key: config[key] for key in SAME_KEYS if key in config}
            named = {"optimizer": "adamw"} | config
            choices = ("strategy", "engine", "model", "trainer", "optimizer")
            cell = cell_with({key: read_option(key, named[key]) for key in choices} | values)
            # These cells reduced gradients in a bucket of this size, not of DeepSpeed's default.
            monkeypatch.setattr("bench.training.engines.zero3.facts.REDUCE_BUCKET", cell.model.hidden_size**2)
            yield abs(memory_need(cell).allocated_bytes / peak - 1)


@pytest.mark.usefixtures("bf16_instructions")
def test_memory_band_contains_nine_in_ten_reference_peaks(monkeypatch):
    errors = sorted(formula_errors(monkeypatch))
    near = sum(error <= FORMULA_SHARE for error in errors)
    assert near >= 0.9 * len(errors)
    half = f"within {100 * statistics.median(errors):.1f} %"
    numbers = (f"Of {len(errors)} peaks", half, f"{near} within")
    page = " ".join(PAGE.read_text().split())
    assert not [words for words in numbers if words not in page]
    assert f"in float32, which keeps more copies of the scores than the formula counts: {errors[-1]:.0%}" == (
        re.search(r"in float32, which.*?: \d+ %", page).group().replace(" %", "%")
    )


@pytest.mark.parametrize(
    ("strategy", "units"),
    [
        ("ulysses", 8.25),
        ("ring", 20),
        ("ring_flash_attn", 16),
        ("torch_cp", 20),
        ("ring_flash_attn_llama3", 2.75),
        ("local", 0),
    ],
)
def test_communication_bytes_of_strategies(strategy, units):
    """`units` are tensors of the size of Q.

    Ulysses has copies of its tensors, and receive buffers for 3/4 of them. A ring has wide gradients (2 + 2),
    K and V sent and received (2 x 2) and their wide gradients (2 x 4). Our ring also has wide gradients of
    its own keys (4).
    """
    heads = {"model.num_heads": 8, "model.num_kv_heads": 8, "model.head_dim": 64}
    cell = cell_with(heads | {"strategy": read_option("strategy", strategy), "cluster.world_size": 4})
    assert communication_bytes(cell) == units * cell.shard_len * 8 * 64 * 2


SHARED = {"strategy": {"name": "ulysses"}, "cluster.world_size": 4}


def test_fsdp2_keeps_whole_gradients_over_micro_steps():
    single, several = (
        memory_need(cell_with({"engine.name": "fsdp2", "grad_accum": steps, **SHARED})) for steps in (1, 2)
    )
    assert several.states - single.states == 4 * parameters(cell_with({}).model)


def test_offloading_reduces_gpu_memory_but_not_cpu_memory():
    switches = {"checkpointing": True, "offload.activations": True, "offload.optimizer": True}
    model = {"model": read_option("model", "qwen3_4b"), "seq_len": "128k", "engine.name": "zero3"}
    on_gpu, off_gpu, on_cpu, off_cpu = (
        memory_need(cell_with(model | values, machine))
        for machine in (FOUR_H100, TWO_CORES)
        for values in ({"checkpointing": True}, switches)
    )
    bucket_bytes = 2 * REDUCE_BUCKET
    assert off_gpu.activations * 36 == on_gpu.activations == on_cpu.activations == off_cpu.activations
    assert (off_gpu.states - bucket_bytes) * 8 == on_gpu.states - bucket_bytes
    assert on_gpu.states == on_cpu.states < off_cpu.states
    assert off_gpu.update < on_gpu.update
