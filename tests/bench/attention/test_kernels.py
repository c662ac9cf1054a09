"""Output, LSE and gradients of every kernel against plain float64 attention."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.kernels import (
    KERNELS,
    Kernel,
    Packing,
    attend,
    kernel_backward,
    kernel_forward,
    torch_flash,
)
from bench.attention.packed import packed_backward, packed_forward
from bench.measure.parity.exact import relative_error
from bench.measure.parity.section import FLOORS, parity_limit
from bench.request.legality import refusal
from bench.training.models import TORCH_DTYPES
from tests.support.cells import FOUR_H100, make_cell
from tests.support.cuda.synchronisations import synchronisations
from tests.support.gpus import GPU_KERNELS, NEEDS_GPU, available, skip_without

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


HEAD_DIMS = {"cpu": 16, "cuda": 64}
KERNEL_ON = [
    *(pytest.param("cpu", name, id=f"cpu-{name}") for name in KERNELS if available(name, "cpu")),
    *(pytest.param("cuda", name, marks=NEEDS_GPU, id=f"cuda-{name}") for name in GPU_KERNELS),
]
"""Devices and the kernels that run on them."""


def every_case():
    """All devices, kernels, dtypes, head ratios and masks that the facts allow."""
    return [
        pytest.param(
            device,
            name,
            dtype,
            heads,
            causal,
            id=f"{device}-{name}-{dtype}-{heads}-{'causal' if causal else 'full'}",
            marks=NEEDS_GPU if device == "cuda" else (),
        )
        for name, facts in KERNEL_FACTS.items()
        for device, dtypes in facts.dtypes.items()
        for dtype in dtypes
        for heads in HEADS
        for causal in (True, False)
    ]


def random_inputs(heads, dtype, device, head_dim):
    num_heads, num_kv_heads = HEADS[heads]
    torch.manual_seed(0)
    shapes = [(2, h, 96, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return [torch.randn(shape).to(device, TORCH_DTYPES[dtype]) for shape in shapes]


def plain_attention(q, k, v, dout, causal):
    """Output, LSE and gradients by the formula, in the inputs' dtype."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    q, k, v = inputs[0], *(x.repeat_interleave(groups, dim=1) for x in inputs[1:])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return named(out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout))


def run(kernel, q, k, v, dout, causal):
    call = {"causal": causal, "scale": q.shape[-1] ** -0.5}
    out, lse = kernel_forward(kernel, q, k, v, **call)
    return named(out, lse, *kernel_backward(kernel, dout, q, k, v, out, lse, **call))


def named(*tensors):
    return dict(zip(("out", "lse", "dq", "dk", "dv"), tensors, strict=True))


@pytest.mark.parametrize(("device", "name", "dtype", "heads", "causal"), every_case())
def test_output_lse_and_gradients_match_float64(device, name, dtype, heads, causal):
    """Limits are those of the parity pass."""
    skip_without(name, device)
    inputs = random_inputs(heads, dtype, device, HEAD_DIMS[device])
    exact = plain_attention(*(x.double() for x in inputs), causal)
    plain = plain_attention(*inputs, causal)
    found = run(KERNELS[name], *inputs, causal)
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in exact.items()}
    assert found["lse"].dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    limits = {key: parity_limit(key, dtype, relative_error(plain[key], exact[key])) for key in exact}
    errors = {key: relative_error(found[key], exact[key]) for key in exact}
    assert {key: error for key, error in errors.items() if error > limits[key]} == {}


class Operators(TorchDispatchMode):
    """Mode that records the names of called operators, in order."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def on_no_gpu(*tensors):
    """Tensors of the same shapes on a GPU; under FakeTensorMode no GPU is needed."""
    return [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors]


@pytest.mark.parametrize("name", [name for name in GPU_KERNELS if name != "math"])
def test_fused_gpu_kernels_get_kv_heads_unrepeated(name):
    shapes = []

    def forward(q, k, v, causal, scale):
        shapes.append((k.shape, v.shape))
        return q, q

    with FakeTensorMode():
        q, k, v, _ = on_no_gpu(*random_inputs("GQA", "bf16", "cpu", 64))
        kernel_forward(replace(KERNELS[name], forward=forward), q, k, v, causal=True, scale=1.0)
    assert shapes == [(k.shape, v.shape)]


def packed(cu_seqlens_q, cu_seqlens_k, causal, device, dtype, heads="GQA", head_dim=16):
    """q, k, v, dout of packed sequences, and their packing."""
    num_heads, num_kv_heads = HEADS[heads]
    lengths = [max(b - a for a, b in itertools.pairwise(cu)) for cu in (cu_seqlens_q, cu_seqlens_k)]
    torch.manual_seed(0)
    shapes = [(cu_seqlens_q[-1], num_heads), (cu_seqlens_k[-1], num_kv_heads)]
    inputs = [torch.randn(*shapes[i], head_dim).to(device, dtype) for i in (0, 1, 1, 0)]
    offsets = (torch.tensor(cu, dtype=torch.int32).to(device) for cu in (cu_seqlens_q, cu_seqlens_k))
    return inputs, Packing(*offsets, *lengths, causal, head_dim**-0.5)


def run_packed(kernel, q, k, v, dout, packing):
    out, lse = packed_forward(kernel, q, k, v, packing)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    packed_backward(kernel, grads, dout, (q, k, v), out, lse, packing)
    return named(out, lse, *grads)


def one_at_a_time(q, k, v, dout, packing):
    """Plain float64 attention of one sequence after another, with a mask aligned to the bottom right."""
    parts = []
    ends = (itertools.pairwise(cu.tolist()) for cu in (packing.cu_seqlens_q, packing.cu_seqlens_k))
    for (q0, q1), (k0, k1) in zip(*ends, strict=True):
        pieces = (q[q0:q1], k[k0:k1], v[k0:k1], dout[q0:q1])
        batch = [x.double().transpose(0, 1)[None] for x in pieces]
        # Missing queries are padded in front, get no gradient and are dropped.
        more = (k1 - k0) - (q1 - q0)
        batch[0], batch[3] = (torch.nn.functional.pad(x, (0, 0, more, 0)) for x in (batch[0], batch[3]))
        part = plain_attention(*batch, packing.causal)
        for key in ("out", "lse", "dq"):
            part[key] = part[key][:, :, more:]
        parts.append({key: x[0].transpose(0, 1) for key, x in part.items()})
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return whole | {"lse": whole["lse"].transpose(0, 1)}


LENGTHS = {"one": ([0, 32], [0, 96]), "three": ([0, 16, 48, 96], [0, 16, 112, 160])}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("device", "name"), KERNEL_ON)
def test_packed_attention_matches_one_sequence_at_a_time(device, name, lengths, causal):
    skip_without(name, device)
    dtype, limit = {"cpu": (torch.float32, 1e-5), "cuda": (torch.bfloat16, 2e-2)}[device]
    inputs, packing = packed(*LENGTHS[lengths], causal, device, dtype, head_dim=HEAD_DIMS[device])
    exact = one_at_a_time(*inputs, packing)
    found = run_packed(KERNELS[name], *inputs, packing)
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in exact.items()}
    errors = {key: relative_error(found[key], exact[key]) for key in exact}
    assert {key: error for key, error in errors.items() if error > limit} == {}


def test_packing_offsets_are_read_from_the_device_once():
    _, packing = packed(*LENGTHS["three"], causal=True, device="cpu", dtype=torch.float32)
    with synchronisations() as waits:
        layers = [[*replace(packing).sequences()] for _ in range(3)]
    assert layers[0] == layers[2] != []
    assert waits == ["tolist"] * 2


def test_torch_flash_packed_is_one_call_without_device_reads(
    monkeypatch,
):
    written = []
    monkeypatch.setattr(torch_flash, "_write", lambda _, gradients: written.extend(gradients))
    inputs, packing = packed([0, 16, 48], [0, 16, 112], True, "cpu", torch.bfloat16)
    with FakeTensorMode(), Operators() as operators:
        cu_q, cu_k = on_no_gpu(packing.cu_seqlens_q, packing.cu_seqlens_k)
        on_gpu = replace(packing, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        *qkv, dout = on_no_gpu(*inputs)
        out, lse = packed_forward(KERNELS["torch_flash"], *qkv, on_gpu)
        KERNELS["torch_flash"].packed.backward(qkv, (dout, *qkv, out, lse), on_gpu)
        found = named(out, lse, *written)
    q, k, v, _ = (x.shape for x in inputs)
    assert {key: x.shape for key, x in found.items()} == named(q, (q[1], q[0]), q, k, v)
    assert operators.called.count("_flash_attention_forward") == 1
    assert operators.called.count("_flash_attention_backward") == 1
    assert not {"repeat_interleave", "_local_scalar_dense", "_to_copy"} & {*operators.called}


def on_views(kernel, q, k, v, dout):
    """Call a kernel like a ring: tensors are halves of longer ones, with heads and tokens swapped."""
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    call = {"causal": True, "scale": q.shape[-1] ** -0.5}
    twice = [torch.cat([x, x], dim=2) for x in (q, k, v, dout, *kernel_forward(kernel, q, k, v, **call))]
    q, k, v, dout, out, lse = (x[:, :, q.shape[2] :] for x in twice)
    return named(out, lse, *kernel_backward(kernel, dout, q, k, v, out, lse, **call))


@pytest.mark.parametrize(("device", "name"), KERNEL_ON)
def test_kernels_take_views_of_longer_tensors(device, name):
    skip_without(name, device)
    dtype = {"cpu": "fp32", "cuda": "bf16"}[device]
    inputs = random_inputs("GQA", dtype, device, HEAD_DIMS[device])
    whole, views = run(KERNELS[name], *inputs, causal=True), on_views(KERNELS[name], *inputs)
    for key, expected in whole.items():
        assert relative_error(views[key], expected) <= FLOORS[dtype].forward, key


def test_kernel_backward_passes_a_contiguous_lse():
    contiguous = []

    def backward(dout, q, k, v, out, lse, causal, scale):
        contiguous.append(lse.is_contiguous())
        return KERNELS["math"].backward(dout, q, k, v, out, lse, causal, scale)

    on_views(Kernel("math", KERNELS["math"].forward, backward), *random_inputs("MHA", "fp32", "cpu", 16))
    assert contiguous == [True]


@pytest.mark.parametrize("name", [name for name in KERNELS if available(name, "cpu")])
def test_large_logits_give_no_nan(name):
    q, k, v = (100 * torch.randn(1, 2, 64, 16) for _ in range(3))
    q.requires_grad_()
    out = attend(q, k, v, kernel=KERNELS[name], causal=True)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_refusals_name_the_lack_and_a_way_out(name):
    facts = KERNEL_FACTS[name]
    if "cpu" not in facts.dtypes:
        reason = refusal(make_cell(f"kernel={name}"))
        assert reason.startswith(f"kernel={name} needs a {facts.required_gpu}; ")
        assert "kernel=torch_flash" in reason
        assert "cluster=gpu" in reason
    cell = make_cell(f"kernel={name}", "dtype=fp32", "engine=ddp", machine=FOUR_H100)
    reasons = facts.refusals(cell)
    assert len(reasons) == ("fp32" not in facts.dtypes["cuda"])
    for reason in reasons:
        assert reason.startswith(f"dtype=fp32 does not work with kernel={name} on cuda; ")
        assert reason.endswith("dtype=bf16 or fp16, or kernel=math")
    if not facts.is_installed:
        reason = refusal(make_cell(f"kernel={name}", machine=FOUR_H100))
        assert f"needs the package {facts.package} and a {facts.required_gpu}; install it with:" in reason
        assert facts.install in reason
        assert reason.endswith("kernel=torch_flash")
