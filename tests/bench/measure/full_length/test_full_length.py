"""Attention is compared with float64 at the length that is measured, in the cell's own step."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.attention.documents import Documents
from bench.attention.kernels import KERNELS, kernel_backward, kernel_forward
from bench.attention.packed import attend_packed, packing_of
from bench.measure.facts import first_beyond
from bench.measure.full_length import key_errors, section
from bench.measure.full_length.comparison import compare
from bench.measure.full_length.key_errors import drawn_keys, key_sums, log_sum_exp
from bench.measure.full_length.rank import FullLengthPass
from bench.measure.full_length.shards import AttentionSettings, Shards, drawn, first_keys, rows
from bench.measure.parity.exact import visible
from bench.ranks.memory_limit import without_memory_limit
from tests.support.cells import run_cell, tiny_cell
from tests.support.gpus import needs_gpu


@pytest.mark.parametrize("strategy", ["local", "ring", "deepspeed_ulysses"])
def test_a_sound_strategy_errs_about_as_much_as_its_control(launcher, tmp_path, strategy):
    cell = tiny_cell(f"strategy={strategy}", "seq_len=2k", "engine=zero3", "checkpointing=true")
    record, _ = run_cell(launcher, cell, tmp_path, without=("parity", "objective"))
    found = record.full_length
    assert (record.status, found.reason, found.tokens) == ("ok", None, 2048), record.reason
    assert found.errors.keys() == {"out", "dq", "dk", "dv", "dk_keys", "dv_keys"}
    assert (found.rows, found.keys, found.keys_reason) == (32, 32, None)
    assert all(0 < found.errors[name] < found.limits[name] / 3 for name in ("dk_keys", "dv_keys"))
    assert 0 < found.errors["out"] < found.limits["out"] < 0.01


MASKS = {
    "full": (False, None),
    "causal": (True, None),
    "packed": (True, Documents(((7, 8, 24), (1, 20, 24)))),
}


@pytest.mark.parametrize("mask", MASKS)
def test_rows_and_keys_are_those_of_attention_and_of_its_gradients(monkeypatch, mask):
    """Keys from two ranks' queries, of which no block holds all."""
    causal, documents = MASKS[mask]
    monkeypatch.setitem(key_errors.BLOCK_SCORES, "cpu", 5 * 24 * 2)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    hidden = ~visible(24, causal=causal, device=q.device, documents=documents).view(-1, 24, 24)
    firsts = None if documents is None else first_keys(documents)
    scale = q.shape[-1] ** -0.5
    out = ((q @ k.transpose(1, 2)) * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    picked = torch.tensor([0, 5, 23])
    with torch.no_grad():
        found_out, found_dq = rows(q[:, picked], k, v, dout[:, picked], hidden[..., picked, :], scale)
        sums = 0
        for held in torch.tensor([7, *range(17, 24), *range(7)]), torch.arange(8, 17):
            of_first = None if firsts is None else firsts[:, held]
            of_held = log_sum_exp(q[:, held], k, held, scale=scale, causal=causal, first_keys=of_first)
            queries = (x[:, held] for x in (q, out, dout))
            unseen = hidden[..., held, :][..., picked]
            sums = sums + key_sums(*queries, of_held, k[:, picked], v[:, picked], unseen, scale)[0]
    close = partial(torch.allclose, rtol=0, atol=1e-13)
    assert close(found_out, out[:, picked])
    assert close(found_dq, dq[:, picked])
    assert close(sums, torch.stack([dk[:, picked], dv[:, picked]]))


KERNEL, SCALE = KERNELS["torch_flash"], 0.25


def lone_call(seed=0, width=16, device="cpu"):
    """Attention of 2,048 tokens on one device in bf16, 4 query and 2 KV heads; queries and the output's
    gradient differ along so many dimensions."""
    torch.manual_seed(seed)
    q, k, v, dout = (torch.randn(1, heads, 2048, 16).bfloat16() for heads in (4, 2, 2, 4))
    q[..., width:] = dout[..., width:] = 0
    q, k, v, dout = (each.to(device) for each in (q, k, v, dout))
    out, of_rows = kernel_forward(KERNEL, q, k, v, causal=True, scale=SCALE)
    gradients = kernel_backward(KERNEL, dout, q, k, v, out, of_rows, causal=True, scale=SCALE)
    named = zip(("dq", "dk", "dv"), gradients, strict=True)
    return {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": of_rows, **dict(named)}


def hop_of(x):
    """What the later half of the queries adds to dk and dv of the earlier half, as in a ring of two."""
    late = [x[name][:, :, 1024:] for name in ("dout", "q", "out", "lse")]
    early = [x[name][:, :, :1024] for name in ("k", "v")]
    return kernel_backward(KERNEL, *late[:2], *early, *late[2:], causal=False, scale=SCALE)[1:]


def packed_call(ends):
    """The same within documents that end there."""
    x = lone_call()
    packing = packing_of(Documents((ends,)), SCALE, x["q"].device)
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]
    out = attend_packed(*leaves, kernel=KERNEL, packing=packing)
    out.backward(x["dout"])
    found = {**x, "out": out, **{f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}}
    return {name: each.detach() for name, each in found.items()}


ALONE = Shards(torch.arange(2048), 1, whole=lambda own: own, summed=torch.clone, seed=7)


def compared(x):
    return compare(x, AttentionSettings("bf16", SCALE, causal=True), ALONE)


def beyond(x):
    found = compared(x)
    assert found.keys == 32
    return first_beyond(found.errors, found.limits)


def test_small_faults_of_key_gradients_are_beyond_the_limits():
    """None of them is seen by the identities."""
    x = lone_call()
    assert beyond(x) is None
    for name, hop in zip(("dk", "dv"), hop_of(x), strict=True):
        without_hop = x[name].clone()
        without_hop[:, 1, :1024] -= hop[:, 1]
        assert beyond({**x, name: without_hop}) == f"{name}_keys"
        assert beyond({**x, name: x[name] * 1.1}) == f"{name}_keys"
    of_heads = torch.tensor([1.0, float("nan")]).bfloat16()[:, None, None]
    assert math.isnan(compared({**x, "dv": x["dv"] * of_heads}).errors["dv_keys"])


def test_attention_across_documents_is_beyond_the_limits():
    shards = replace(ALONE, first_keys=first_keys(Documents(((700, 701, 2048),))))
    attention = AttentionSettings("bf16", SCALE, causal=True)
    found = compare(packed_call((700, 701, 2048)), attention, shards)
    assert first_beyond(found.errors, found.limits) is None
    across = compare(packed_call((1024, 2048)), attention, shards)
    assert first_beyond(across.errors, across.limits) == "out"


def test_a_loops_autocast_does_not_reach_the_comparison():
    x = lone_call()
    with torch.autocast("cpu", torch.bfloat16):
        found = compared(x)
    assert found == compared(x)


@needs_gpu
def test_a_gpu_compares_as_a_cpu_does_in_tf32_too(monkeypatch):
    """The kernel's own errors differ: the GPU's result is compared on both."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    monkeypatch.setitem(key_errors.BLOCK_SCORES, "cuda", 2**20)
    x = lone_call(device="cuda")
    found, on_cpu = compared(x), compared({name: each.cpu() for name, each in x.items()})
    assert found.errors == pytest.approx(on_cpu.errors, rel=0.02)
    assert found.errors["dk_keys"] < 0.01
    assert beyond(x) is None
    assert beyond({**x, "dk": x["dk"] * 1.1}) == "dk_keys"


def test_sums_over_queries_that_cancel_by_chance_are_no_fault():
    """Along one dimension some do; relative to themselves rounding would be beyond the limit."""
    assert beyond(lone_call(seed=1, width=1)) is None


def test_keys_are_compared_as_far_as_a_cpu_affords_their_scores(monkeypatch):
    monkeypatch.setattr(section, "CPU_SCORES", 4 * 2048 * 1024 - 1)
    found = compared(lone_call())
    assert (found.keys, found.errors.keys()) == (0, {"out", "dq", "dk", "dv"})
    assert found.keys_reason == "takes 8.4e+06 scores a rank, more than the 8.4e+06 that a CPU is given"
    assert section.why_no_keys("cuda", 10**15) is None


def test_every_seed_samples_other_tokens_with_the_last_row_and_the_first_key():
    for draw, always in (drawn, 2047), (drawn_keys, 0):
        draws = [draw(2048, 8, seed) for seed in range(8)]
        assert len({tuple(each.tolist()) for each in draws}) == 8
        assert {len(set(each.tolist())) for each in draws} == {8}
        assert {int(each[-1]) for each in draws} == {always}
        assert {0 <= int(each.min()) <= int(each.max()) < 2048 for each in draws} == {True}


def test_what_is_copied_for_the_check_does_not_count_in_a_memory_limit():
    assert FullLengthPass(measurement=None).captured.around is without_memory_limit
