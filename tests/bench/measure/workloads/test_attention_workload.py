"""`workload=attention`: times and errors of one call, after the checks that training has, too."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.measure.attention.rank import error_ulps, ulp
from bench.measure.attention.section import FACTS, AttentionSection
from bench.measure.workloads import attention as attention_alone
from bench.measure.workloads.workload import WorkloadRank
from bench.ranks.groups import make_groups
from bench.ranks.log import StepPhase
from bench.request.legality import refusal
from bench.run.cell.outcome import analytic
from bench.strategies import STRATEGIES, load_strategy_class
from bench.training.models import empty_model
from tests.support.cells import CHECKS, INSTALLED, run_cell, tiny_cell, words_for

WORDS = ("workload=attention", "cluster.world_size=2", "measure.steps=2", "seq_len=512")
FOUR_RANKS = {"usp": ("cluster.world_size=4",)}
"""Words for strategies with two dimensions."""

KEEPS_ROUNDED = ("ring_self_attention",)
"""Strategies with a larger error in one row of two keys, where terms cancel but their rounding does not."""


@pytest.fixture(scope="module")
def run_record(launcher, tmp_path_factory):
    """Function that runs a cell with more words and returns its record."""

    def run(*words):
        folder = tmp_path_factory.mktemp("cell")
        record, _ = run_cell(launcher, tiny_cell(*WORDS, *words), folder, without=CHECKS)
        assert record.status == "ok", record.reason
        return record

    return run


@pytest.mark.parametrize("strategy", INSTALLED)
def test_attention_of_every_strategy_is_timed_and_compared(run_record, strategy):
    words = (f"strategy={strategy}", *words_for(strategy), *FOUR_RANKS.get(strategy, ()))
    record = run_record(*words)
    calls = record.sections["attention"]
    ranks = record.config["cluster.world_size"]
    assert len(calls.forward_ms) == ranks == len(record.timing.step_times_ms)
    for rank in range(ranks):
        times = (
            calls.forward_ms[rank],
            calls.backward_ms[rank],
            record.timing.step_times_ms[rank],
        )
        assert all(forward + backward <= step for forward, backward, step in zip(*times, strict=True))
    assert calls.one_device_forward_ms
    assert 0 < calls.error_ulps["out"] <= 2 * calls.control_error_ulps["out"] + 1
    factor = 3 if strategy in KEEPS_ROUNDED else 2
    assert 0 < calls.error_ulps["dq"] <= factor * calls.control_error_ulps["dq"] + 1
    assert record.losses is None


@pytest.mark.parametrize(("strategy", "mask"), [("ring", "causal"), ("ulysses", "full")])
def test_float64_error_of_sampled_rows_is_some_ulps(run_record, strategy, mask):
    record = run_record(f"strategy={strategy}", f"workload.mask={mask}", "dtype=fp64", "kernel=math")
    assert max(record.attention.error_ulps.values()) < 64


def test_flops_of_a_full_mask_are_twice_those_below_the_diagonal():
    cells = (tiny_cell(*WORDS, f"workload.mask={mask}") for mask in ("causal", "full"))
    causal, full = (analytic(cell).attention_forward_flops for cell in cells)
    assert full * (512 + 1) == causal * 2 * 512


@pytest.mark.parametrize("word", ["engine=fsdp2", "grad_accum=2", "checkpointing=true"])
def test_cell_id_ignores_settings_of_training(word):
    assert tiny_cell(*WORDS, word).cell_id == tiny_cell(*WORDS).cell_id


def test_full_mask_is_refused_if_the_package_has_none():
    reason = refusal(tiny_cell(*WORDS, "strategy=ring_flash_attn", "workload.mask=full"))
    assert "workload.mask=full" in reason
    assert "take workload.mask=causal" in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ulp_is_the_distance_to_the_next_number(dtype):
    value = torch.tensor([3.0, 0.001, 1000.0], dtype=dtype)
    above = torch.nextafter(value, torch.full_like(value, torch.inf))
    assert torch.equal((above - value).double(), ulp(value, dtype))


def test_error_ulps_counts_in_ulps_of_each_row():
    exact = torch.tensor([[1.0, 0.5], [0.001, 0.0005]], dtype=torch.float64)
    actual = torch.nextafter(exact.float(), torch.zeros(2, 2) + 2)
    assert error_ulps(actual, exact.float().double()).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "dtype", "error", "control", "is_wrong"),
    [
        ("out", "bf16", 4.0, 0.5, False),
        ("out", "bf16", 5.0, 0.5, True),
        ("dq", "bf16", 32.0, 8.0, False),
        ("dq", "bf16", 81.0, 8.0, True),
        ("dq", "fp64", 46.0, 1.0, False),
        ("dq", "fp64", 5000.0, 1.0, True),
    ],
)
def test_attention_gate_allows_a_multiple_of_one_devices_error(name, dtype, error, control, is_wrong):
    """Errors in fp32 and fp64 come from the order of sums, so the floor of the parity pass applies."""
    errors = {"error_ulps": {name: error}, "control_error_ulps": {name: control}}
    section = AttentionSection(forward_ms=[[1.0]], backward_ms=[[1.0]], error_rows=1, **errors)
    cell = tiny_cell("workload=attention", f"dtype={dtype}")
    assert bool(FACTS.gate(cell, section)) == is_wrong
    assert FACTS.gate(cell, replace(section, control_error_ulps=None)) is None


@pytest.fixture
def one_rank():
    """A process group of one rank."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_warm_up_calls_fill_the_requested_seconds(one_rank, monkeypatch):
    """On a GPU, training's largest number of warm-up steps takes next to no time if they are single calls."""
    cell = tiny_cell("workload=attention", "strategy=local", "cluster.world_size=1", "measure.warmup_s=3")
    strategy = load_strategy_class("local")(cell, make_groups(cell), STRATEGIES["local"])
    calls = []
    with strategy.install() as wiring:
        workload = attention_alone.AttentionWorkload(
            WorkloadRank(strategy, wiring, torch.device("cpu"), StepPhase())
        )
        monkeypatch.setattr(workload, "step", calls.append)
        clock = SimpleNamespace(perf_counter=iter([5.0, 5.015625]).__next__)  # a call takes 1/64 s
        monkeypatch.setattr(attention_alone, "time", clock)
        workload.short_step()
    assert len(calls) == 1 + 1 + 3 * 64


def test_inputs_have_the_strides_of_a_models_attention_inputs(one_rank):
    cell = tiny_cell("workload=attention", "strategy=local", "cluster.world_size=1", "batch=2")
    strategy = load_strategy_class("local")(cell, make_groups(cell), STRATEGIES["local"])
    strides = {}

    def attention(module, q, k, v, mask, **keywords):
        out = torch.zeros_like(q.transpose(1, 2)).requires_grad_()
        out.register_hook(lambda dout: strides.update(dout=dout.transpose(1, 2).stride()))
        strides.update(q=q.stride(), k=k.stride(), v=v.stride())
        return out, None

    with strategy.install() as wiring:
        workload = attention_alone.AttentionWorkload(
            WorkloadRank(strategy, wiring, torch.device("cpu"), StepPhase())
        )
        ALL_ATTENTION_FUNCTIONS[wiring.attention_name] = attention
        model = empty_model(cell.model, attention_name=wiring.attention_name, max_positions=cell.seq_len)
        model.to_empty(device="cpu")(torch.zeros(2, cell.seq_len, dtype=torch.long)).logits.sum().backward()
    for inputs in (workload.inputs[0], workload.inputs[3]):
        assert {name: x.stride() for name, x in zip(("q", "k", "v", "dout"), inputs, strict=True)} == strides
    first_rows = {tuple(dout[0, 0, 0].tolist()) for *_, dout in workload.inputs}
    assert len(first_rows) == len(workload.inputs)
    rows = len(workload.inputs) * cell.model.head_dim * 2
    assert workload.spare_bytes == rows * 2 * (cell.model.num_heads + cell.model.num_kv_heads)
