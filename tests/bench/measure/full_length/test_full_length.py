"""The full_length pass compares an attention call of the cell's own step with float64."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.attention.documents import Documents
from bench.attention.kernels import KERNELS, kernel_backward, kernel_forward
from bench.attention.packed import attend_packed, packing_of, positions_in_documents
from bench.attention.watch import AttentionWatch, CapturedCall
from bench.measure.facts import first_beyond
from bench.measure.full_length import key_errors
from bench.measure.full_length import section as section_module
from bench.measure.full_length.comparison import compare
from bench.measure.full_length.key_errors import key_sums, log_sum_exp, sample_keys
from bench.measure.full_length.rank import FullLengthPass
from bench.measure.full_length.shards import (
    AttentionSettings,
    Shards,
    attention_rows,
    sample_tokens,
)
from bench.measure.parity.exact import visible_keys
from bench.ranks.memory_limit import without_memory_limit
from tests.support.cells import make_cell, run_cell, tiny_cell
from tests.support.gpus import needs_gpu


@pytest.mark.parametrize("strategy", ["local", "ring", "deepspeed_ulysses"])
def test_full_length_errors_of_sound_strategies_are_small(launcher, tmp_path, strategy):
    model = ("model=qwen3_nano", "model.num_layers=3", "checkpointing=true")
    words = (f"strategy={strategy}", "seq_len=2k", "engine=zero3", *model)
    cells = (tiny_cell(*words, f"seed={seed}") for seed in range(16))
    cell = next(cell for cell in cells if section_module.sampled_call(cell) == 1)
    record, _ = run_cell(launcher, cell, tmp_path, without=("parity", "objective"))
    section = record.full_length
    assert (record.status, section.reason, section.tokens) == ("ok", None, 2048), record.reason
    assert section.errors.keys() == {"out", "dq", "dk", "dv", "dk_keys", "dv_keys"}
    assert (section.call, section.rows, section.keys, section.keys_reason) == (1, 32, 32, None)
    assert all(0 < section.errors[name] < section.limits[name] / 3 for name in ("dk_keys", "dv_keys"))
    assert 0 < section.errors["out"] < section.limits["out"] < 0.01


MASKS = {
    "full": (False, None),
    "causal": (True, None),
    "packed": (True, Documents(((7, 8, 24), (1, 20, 24)))),
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_rows_and_key_sums_equal_autograd(monkeypatch, mask):
    """The sums of keys come from two ranks' queries, in blocks that hold a part of them."""
    causal, documents = MASKS[mask]
    monkeypatch.setitem(key_errors.BLOCK_SCORES, "cpu", 5 * 24 * 2)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    hidden = ~visible_keys(24, causal=causal, device=q.device, documents=documents).view(-1, 24, 24)
    firsts = None if documents is None else torch.arange(24) - positions_in_documents(documents)
    scale = q.shape[-1] ** -0.5
    out = ((q @ k.transpose(1, 2)) * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sampled = torch.tensor([0, 5, 23])
    with torch.no_grad():
        row_out, row_dq = attention_rows(
            q[:, sampled], k, v, dout[:, sampled], hidden[..., sampled, :], scale
        )
        sums = 0
        for local in torch.tensor([7, *range(17, 24), *range(7)]), torch.arange(8, 17):
            local_firsts = None if firsts is None else firsts[:, local]
            lse = log_sum_exp(q[:, local], k, local, scale=scale, causal=causal, first_keys=local_firsts)
            queries = (x[:, local] for x in (q, out, dout))
            unseen = hidden[..., local, :][..., sampled]
            sums = sums + key_sums(*queries, lse, k[:, sampled], v[:, sampled], unseen, scale)[0]
    close = partial(torch.allclose, rtol=0, atol=1e-13)
    assert close(row_out, out[:, sampled])
    assert close(row_dq, dq[:, sampled])
    assert close(sums, torch.stack([dk[:, sampled], dv[:, sampled]]))


KERNEL, SCALE = KERNELS["torch_flash"], 0.25


def one_device_call(seed=0, width=16, device="cpu"):
    """Return tensors of a bf16 call on one device, with 2,048 tokens, 4 query and 2 KV heads.

    Queries and the output's gradient are 0 from dimension `width` on.
    """
    torch.manual_seed(seed)
    q, k, v, dout = (torch.randn(1, heads, 2048, 16).bfloat16() for heads in (4, 2, 2, 4))
    q[..., width:] = dout[..., width:] = 0
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    out, lse = kernel_forward(KERNEL, q, k, v, causal=True, scale=SCALE)
    gradients = kernel_backward(KERNEL, dout, q, k, v, out, lse, causal=True, scale=SCALE)
    named = zip(("dq", "dk", "dv"), gradients, strict=True)
    return {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, **dict(named)}


def hop_of(x):
    """Return the part of dk and dv of the earlier half that comes from later queries, as in a ring of two."""
    late = [x[name][:, :, 1024:] for name in ("dout", "q", "out", "lse")]
    early = [x[name][:, :, :1024] for name in ("k", "v")]
    return kernel_backward(KERNEL, *late[:2], *early, *late[2:], causal=False, scale=SCALE)[1:]


def packed_call(ends):
    """Return the tensors of a call whose documents end at `ends`."""
    x = one_device_call()
    packing = packing_of(Documents((ends,)), SCALE, x["q"].device)
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]
    out = attend_packed(*leaves, kernel=KERNEL, packing=packing)
    out.backward(x["dout"])
    gradients = {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}
    return {name: tensor.detach() for name, tensor in {**x, "out": out, **gradients}.items()}


ALONE = Shards(torch.arange(2048), 1, gather=lambda shard: shard, all_reduce=torch.clone, seed=7)


def compare_alone(x):
    return compare(x, AttentionSettings("bf16", SCALE, causal=True), ALONE)


def beyond_limit(x):
    section = compare_alone(x)
    assert section.keys == 32
    return first_beyond(section.errors, section.limits)


def test_small_faults_of_key_gradients_are_beyond_the_limits():
    """No identity finds them."""
    x = one_device_call()
    assert beyond_limit(x) is None
    for name, hop in zip(("dk", "dv"), hop_of(x), strict=True):
        without_hop = x[name].clone()
        without_hop[:, 1, :1024] -= hop[:, 1]
        assert beyond_limit({**x, name: without_hop}) == f"{name}_keys"
        assert beyond_limit({**x, name: x[name] * 1.1}) == f"{name}_keys"
    nan_in_one_head = torch.tensor([1.0, float("nan")]).bfloat16()[:, None, None]
    assert math.isnan(compare_alone({**x, "dv": x["dv"] * nan_in_one_head}).errors["dv_keys"])


def test_attention_across_documents_is_beyond_the_limits():
    positions = positions_in_documents(Documents(((700, 701, 2048),)))
    shards = replace(ALONE, first_keys=torch.arange(2048) - positions)
    attention = AttentionSettings("bf16", SCALE, causal=True)
    within = compare(packed_call((700, 701, 2048)), attention, shards)
    assert first_beyond(within.errors, within.limits) is None
    across = compare(packed_call((1024, 2048)), attention, shards)
    assert first_beyond(across.errors, across.limits) == "out"


def test_comparison_disables_the_autocast_of_a_loop():
    x = one_device_call()
    with torch.autocast("cpu", torch.bfloat16):
        section = compare_alone(x)
    assert section == compare_alone(x)


@needs_gpu
def test_comparison_on_a_gpu_with_tf32_equals_that_on_a_cpu(monkeypatch):
    """Both compare the GPU's result, because the kernel's own errors differ between devices."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    monkeypatch.setitem(key_errors.BLOCK_SCORES, "cuda", 2**20)
    x = one_device_call(device="cuda")
    on_gpu, on_cpu = compare_alone(x), compare_alone({name: tensor.cpu() for name, tensor in x.items()})
    assert on_gpu.errors == pytest.approx(on_cpu.errors, rel=0.02)
    assert on_gpu.errors["dk_keys"] < 0.01
    assert beyond_limit(x) is None
    assert beyond_limit({**x, "dk": x["dk"] * 1.1}) == "dk_keys"


def test_key_sums_that_cancel_by_chance_are_within_the_limits():
    """With one dimension some sums cancel; relative to such a sum, rounding would be beyond the limit."""
    assert beyond_limit(one_device_call(seed=1, width=1)) is None


def test_key_gradient_may_be_zero_where_its_two_terms_cancel():
    """A kernel that rounds dP and dO*O to 16 bits gives zero; found with `ring_self_attention`."""
    x = one_device_call()
    key = int(sample_keys(2048, 32, ALONE.seed).max())
    gap = (x["v"].repeat_interleave(2, dim=1) - x["out"])[:, :, key].float()
    own = x["dout"][:, :, key].float()
    x["dout"][:, :, key] = (own - gap * (own * gap).sum(-1, True) / gap.square().sum(-1, True)).bfloat16()
    x["dout"][:, :, key + 1 :] = 0  # no other query contributes to the key
    inputs = (x[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    x["dq"], x["dk"], x["dv"] = kernel_backward(KERNEL, *inputs, causal=True, scale=SCALE)
    x["dk"][:, 0, key] = 0
    assert beyond_limit(x) is None


def test_keys_are_not_compared_beyond_the_scores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(section_module, "CPU_SCORES", 4 * 2048 * 1024 - 1)
    compared = compare_alone(one_device_call())
    assert (compared.keys, compared.errors.keys()) == (0, {"out", "dq", "dk", "dv"})
    assert "needs 8.4e+06 attention scores per rank" in compared.keys_reason
    assert "at most 8.4e+06" in compared.keys_reason
    assert section_module.why_no_keys("cuda", 10**15) is None


def test_sampled_tokens_differ_by_seed_except_one_fixed_token():
    """Rows include a shard's last token, keys its first."""
    for sample, always in (sample_tokens, 2047), (sample_keys, 0):
        samples = [sample(2048, 8, seed).tolist() for seed in range(8)]
        assert len({tuple(tokens) for tokens in samples}) == 8
        assert {len(set(tokens)) for tokens in samples} == {8}
        assert {tokens[-1] for tokens in samples} == {always}
        assert {0 <= min(tokens) <= max(tokens) < 2048 for tokens in samples} == {True}


def test_captured_copies_do_not_count_in_a_memory_limit():
    assert FullLengthPass(measurement=None).captured.copy_context is without_memory_limit


@pytest.mark.parametrize("number", [0, 2])
def test_captured_call_is_the_chosen_one_of_those_that_train(number):
    watch = AttentionWatch()
    watch.captured = CapturedCall(number=number)
    frozen = torch.ones(1, 1, 4, 8)
    for value in (0.0, 1.0, 2.0):
        watch.run(lambda q, k, v: v, frozen, frozen, frozen)  # does not train, so it does not count
        q = torch.full((1, 1, 4, 8), value, requires_grad=True)
        watch.run(lambda q, k, v: q + k + v, q, q, q).sum().backward()
    assert watch.captured.is_whole
    assert set(watch.captured.tensors_on(torch.device("cpu"))["q"].flatten().tolist()) == {float(number)}


def test_cells_compare_calls_of_different_layers():
    model = ("model=qwen3_nano", "model.num_layers=4")
    calls = {section_module.sampled_call(make_cell(*model, f"seed={seed}")) for seed in range(16)}
    assert calls == {0, 1, 2, 3}
    assert section_module.sampled_call(make_cell(*model, "workload=attention")) == 0
