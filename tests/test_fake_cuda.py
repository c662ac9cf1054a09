"""Cells on simulated CUDA: code of GPU ranks runs, and timed steps wait no more than docs/gpus.md lists.

These tests need no GPU; `tests/gpu` has those that do.
"""

import os
import re
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel
from transformers import modeling_utils

import bench
from bench.attention.kernels import KERNELS
from bench.common.environment import Machine, installed_version
from bench.config import Resume
from bench.cost.memory import memory_need
from bench.extras.observe.cell import ObserveRequest
from bench.extras.observe.loop_ranks import device_of
from bench.plan.plan import plan
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.record.record import Provenance
from bench.record.store import read_records
from bench.run.node import local
from bench.run.node.worker import join
from bench.run.node.worker import run_cell as run_in_rank
from bench.run.progress import Progress
from bench.run.references import References
from bench.run.resume import kept_records
from bench.run.sweep import run_plan
from bench.strategies import STRATEGIES
from bench.strategies.torch_cp.attention import register_cpu_flash_operator
from bench.training.models import empty_model
from bench.training.trainer_facts import TRAINER_FACTS
from bench.training.trainers import stack
from bench.training.trainers.stack_engines import STACK_ENGINES, prepare_accelerate
from bench.training.weights import fill_layers, model_weights
from tests.support.cells import (
    CHECKS,
    NEED_ALL_RANKS,
    TWO_CORES,
    make_cell,
    make_raw,
    run_cell,
    variants,
    words_for,
)
from tests.support.cuda import fake_cudnn
from tests.support.cuda.fake_cuda import CUDA, OnDevice, notes_of, problems
from tests.support.cuda.fake_nvml import MEMORY_BYTES, NAME
from tests.support.many_cells import results_of_cells
from tests.support.records import read_lines

pytestmark = pytest.mark.ranks
TWO_H100 = Machine(
    gpus=(NAME,) * 2, cores=16, cpu="x", memory_bytes=2**40, gpu_memory_bytes=(MEMORY_BYTES,) * 2,
    cudnn_fault="without cuDNN",
)  # fmt: skip
SHORT = (
    "model=qwen3_nano", "seq_len=256", "data=synthetic", "measure.steps=2", "measure.warmup_steps=0",
    "measure.warmup_s=0", "measure.min_timed_steps=1", "measure.repeats=1", "measure.trace=false",
    "measure.reference_budget_s=0",
)  # fmt: skip
ONE_STEP = ObserveRequest(strategy="own", folder=Path(), steps=1, warmup_steps=0, report=False)
ULYSSES = "strategy=deepspeed_ulysses"
STACKS = [trainer for trainer, facts in TRAINER_FACTS.items() if facts.is_stack]
PAGE = (Path(__file__).parents[1] / "docs" / "gpus.md").read_text()
LISTED = set(re.findall(r"`(\w+/\w+\.py:\w+)`", PAGE))
"""Functions that docs/gpus.md lists as making the host wait in a timed step."""


def fake_cell(*words):
    return make_cell(*SHORT, *words, machine=TWO_H100)


CELLS = {
    "zero3, traced": ("strategy=ring", "engine=zero3", "measure.trace=true"),
    "fsdp2, packed, activations offloaded": (
        "strategy=ulysses", "engine=fsdp2", "data.packing=documents", "offload.activations=true",
    ),
    "ddp, two whole sequences": ("strategy=local", "engine=ddp", "batch=2"),
    "attention alone": ("strategy=ring", "workload=attention"),
    "optimizer offloaded": ("strategy=ring", "engine=zero3", "offload.optimizer=true"),
    **{
        f"{trainer}, cudnn, activations offloaded": (
            ULYSSES, f"trainer={trainer}", "kernel=cudnn", "measure.trace=true", "offload.activations=true",
        )
        for trainer in STACKS
    },
    "accelerate": (ULYSSES, "trainer=accelerate"),
    "accelerate, ddp": ("strategy=local", "engine=ddp", "dp_shard=2", "trainer=accelerate"),
    "transformers": (ULYSSES, "trainer=transformers"),
    "trl": (ULYSSES, "trainer=trl", "measure.trace=true"),
}  # fmt: skip


def train_with_offload(job, log):
    """Run a rank, and fail unless transformers has moved activations to host memory."""
    uses = []

    class CountedOffload(modeling_utils.save_on_cpu):
        def __init__(self, **named):
            super().__init__(**named)
            uses.append(named)

    modeling_utils.save_on_cpu = CountedOffload
    report = run_in_rank(job, log)
    assert uses
    return report


@pytest.mark.parametrize("words", CELLS.values(), ids=CELLS)
def test_cell_runs_on_fake_cuda(fake_gpus, launcher, tmp_path, words):
    if "trainer=trl" in words and installed_version("trl") is None:
        pytest.skip("trl is not installed")
    without = ("parity", "full_length") if "measure.trace=true" in words else CHECKS
    is_native = not any(word.startswith("trainer=") for word in words)
    entry = None if is_native or "offload.activations=true" not in words else train_with_offload
    record, folder = run_cell(launcher, fake_cell(*words), tmp_path, entry, without=without)
    assert record.status == "ok", record.reason
    assert record.provenance == Provenance.SYNTHETIC
    notes = notes_of(folder)
    assert problems(notes) == []
    assert all(of_rank["steps"] > 0 and of_rank["calls"] for of_rank in notes)
    waits = {text.rpartition(" in ")[2] for of_rank in notes for text in of_rank["waits"]}
    assert waits <= LISTED, waits - LISTED
    if "measure.trace=true" in words:
        kernel = "cudnn_attention" if "kernel=cudnn" in words else "flash_attention_for_cpu"
        assert record.trace.torch_attention == [f"aten::_scaled_dot_product_{kernel}"]
    if is_native and {*words} & {"engine=fsdp2", "engine=ddp", "workload=attention"}:
        assert waits == set()


def train_without_a_backend(job, log):
    """Run a rank whose stack leaves the choice of the attention kernel to torch."""
    stack.SDPA_BACKENDS = {}
    return run_in_rank(job, log)


def test_another_kernel_than_the_named_one_is_found(fake_gpus, launcher, tmp_path):
    cell = fake_cell(ULYSSES, "trainer=transformers", "measure.trace=true")
    record, _ = run_cell(launcher, cell, tmp_path, train_without_a_backend, without=CHECKS)
    assert record.status == "wrong_result"
    operator = "aten::_scaled_dot_product_cudnn_attention"
    assert record.reason == f"the traced step ran {operator}, not kernel=torch_flash"


def compute_cudnn_wrongly(job, log):
    right = fake_cudnn.kernel_forward

    def wrong(*args, **named):
        out, lse = right(*args, **named)
        return 1.1 * out, lse

    fake_cudnn.kernel_forward = wrong
    return run_in_rank(job, log)


@pytest.mark.parametrize("failing", ["the first cell", "its reference"])
def test_sweep_leaves_cudnn_if_its_first_parity_fails(fake_gpus, launcher, tmp_path, monkeypatch, failing):
    folder, printed = tmp_path / "swept", StringIO()
    words = (*SHORT, "engine=ddp", f"sweep_dir={folder}")
    if failing == "its reference":
        words = (*words, "measure.reference_budget_s=60")
        cell = fake_cell("strategy=local", "kernel=cudnn")
        failed, _ = run_cell(launcher, cell, tmp_path, compute_cudnn_wrongly)
        monkeypatch.setattr(References, "run_missing", lambda *_: failed)
    raws = [make_raw(*words, f"strategy={name}") for name in ("ring", "ulysses", "ring_self_attention")]
    machine = replace(TWO_H100, cudnn_fault=None)
    code = run_plan(
        plan(raws, machine, single=False),
        launcher,
        Progress(Console(file=printed)),
        write_report=lambda _: True,
        entry=lambda _: compute_cudnn_wrongly,
    )
    records = read_records(folder / "records.jsonl")
    ended = [(record.config["kernel"], record.status) for record in records]
    first = [("cudnn", "wrong_result")] * (failing == "the first cell")
    assert ended == [*first, ("torch_flash", "ok"), ("torch_flash", "ok"), ("math", "ok")]
    assert code == 0
    (line,) = [line for line in printed.getvalue().splitlines() if line.startswith("kernel=auto: torch")]
    assert line.startswith("kernel=auto: torch_flash for the whole sweep, because the first parity check")
    again = plan([{**raw, "resume": True} for raw in raws], machine, single=False)
    assert "FlashAttention-2; the sweep of this folder does not run on cudnn" in " ".join(again.notes)
    assert {entry.cell.cell_id for entry in again.cells} == {
        record.cell_id for record in records[len(first) :]
    }


@pytest.mark.parametrize("trainer", STACKS)
def test_stack_trains_in_two_sequence_groups(fake_gpus, launcher, tmp_path, trainer):
    if installed_version(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    machine = replace(TWO_H100, gpus=(NAME,) * 4, gpu_memory_bytes=(MEMORY_BYTES,) * 4)
    cell = make_cell(*SHORT, ULYSSES, f"trainer={trainer}", "sp_degree=2", "dp_replicate=2", machine=machine)
    record, folder = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert record.status == "ok", record.reason
    assert problems(notes_of(folder)) == []


REPLAYED = (
    ("strategy=ulysses", "engine=zero3"),
    ("strategy=ring", "engine=fsdp2"),
    ("strategy=ring", "layout=contiguous", "engine=zero3", "offload.optimizer=true"),
    ("strategy=deepspeed_ulysses", "engine=ddp", "data.packing=documents"),
    ("strategy=ring_flash_attn", "engine=zero3", "replay.rank=2"),
    ("strategy=gather_kv", "workload=attention"),
)
ONE_H100 = replace(TWO_H100, gpus=(NAME,), gpu_memory_bytes=(MEMORY_BYTES,))


@pytest.mark.parametrize("words", REPLAYED, ids=" ".join)
def test_rank_of_four_is_replayed_on_one_gpu(fake_gpus, launcher, tmp_path, words):
    cell = make_cell(*SHORT, "mode=replay", "cluster.world_size=4", *words, machine=ONE_H100)
    record, folder = run_cell(launcher, cell, tmp_path, without=[*CHECKS, *NEED_ALL_RANKS])
    assert record.status == "ok", record.reason
    (notes,) = notes_of(folder)
    assert notes["faults"] == []
    assert sum(band.high for band in record.analytic.link_ms.values()) > 0


RUNS_ON_FAKE = (
    "local", "ulysses", "ring", "usp", "ulysses_chunked", "gather_kv", "ring_self_attention",
    "distflash_attn", "deepspeed_ulysses", "deepspeed_fpdt", "ring_flash_attn", "ring_flash_attn_llama3",
)  # fmt: skip
"""Strategies whose packages call no operator that only CUDA has."""


def test_strategies_send_the_bytes_of_their_formulas(fake_gpus, launcher, tmp_path):
    cells = {name: fake_cell(f"strategy={name}", "engine=fsdp2", *words_for(name)) for name in RUNS_ON_FAKE}
    inspections = results_of_cells(launcher, tmp_path, cells)
    for name, cell in cells.items():
        most = max(rank["sent_bytes"].get("attention", 0) for rank in inspections[name])
        assert most == (STRATEGIES[name].communication_bytes(cell) or 0), name
    for folder in tmp_path.iterdir():
        assert problems(notes_of(folder)) == []


@pytest.mark.parametrize("name", STRATEGIES.built_in)
def test_bytes_and_memory_of_gpu_cells_need_no_run(name):
    for layout, options in variants(STRATEGIES[name]):
        choices = (f"layout={layout}", *(f"strategy.{key}={text}" for key, text in options))
        cell = fake_cell(f"strategy={name}", "engine=fsdp2", *words_for(name), *choices)
        assert (STRATEGIES[name].communication_bytes(cell) or 0) >= 0
        assert memory_need(cell).total_bytes > 0


def test_rank_is_idle_if_its_gpu_is_idle(monkeypatch):
    monkeypatch.setattr(local, "idle_gpus", lambda: {1})
    for words, idle in (((), {5}), (("cluster.ranks_per_gpu=2", "cluster.world_size=2"), set())):
        ranks = SimpleNamespace(_cluster=fake_cell(*words).cluster, ranks=[4, 5])
        assert local.LocalRanks._idle_ranks(ranks) == idle


def test_tensor_above_the_memory_limit_is_out_of_memory(fake_gpus, launcher, tmp_path):
    cell = fake_cell("strategy=ring", "engine=ddp", "cluster.memory_limit_gib=0.000001")
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert record.status == "out_of_memory"
    assert record.failure.out_of_memory.memory == "device"


def test_cell_has_nvtx_ranges_under_a_memory_limit(fake_gpus, launcher, tmp_path):
    """The ranges are for Nsight Systems; the limit is not reached."""
    words = ("measure.nvtx=true", "cluster.memory_limit_gib=60")
    cell = fake_cell("strategy=usp", "engine=ddp", *words)
    record, folder = run_cell(launcher, cell, tmp_path, without=("parity", "full_length"))
    assert record.status == "ok", record.reason
    assert problems(notes_of(folder)) == []
    for note in notes_of(folder):
        step = [f"timing {phase}" for phase in ("load", "forward", "loss", "backward", "optimizer")]
        assert (note["ranges"][0], note["ranges"][-1]) == ("start", "finish")
        assert " ".join(step) in " ".join(note["ranges"])
        assert len(note["open_ranges"]) == 1  # the last range ends with the process


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_rank_is_bound_to_the_cpus_near_its_gpu(fake_gpus, launcher, tmp_path):
    """Every fake GPU has its own NUMA node with one CPU. torch only looks for the file numactl."""
    (tmp_path / "numactl").touch(0o755)
    bound = fake_cell("strategy=ring", "engine=ddp", "cluster.numa_binding=node")
    with_numactl = replace(bound, env=(("PATH", f"{tmp_path}:{os.environ['PATH']}"),))
    record, _ = run_cell(launcher, with_numactl, tmp_path, without=CHECKS)
    assert record.status == "ok", record.reason
    assert record.telemetry.cpus == [str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2]]
    without = replace(bound, env=(("PATH", str(tmp_path / "nowhere")),))
    record, _ = run_cell(launcher, without, tmp_path, without=CHECKS)
    assert (record.status, record.failure.kind) == ("unsupported", "RefusedError")
    assert "cluster.numa_binding=node: torch cannot bind this rank: numactl CLI is required" in record.reason


def losses_on(launcher, folder, machine, *words):
    equal = ("strategy=ulysses", "engine=ddp", "dtype=fp32", "kernel=math", "loss=untiled")
    cell = make_cell(*SHORT, *equal, "checkpointing=false", *words, machine=machine)
    record, _ = run_cell(launcher, cell, folder, without=CHECKS)
    assert record.status == "ok", record.reason
    return record.losses


def test_rows_fetched_ahead_belong_to_their_step(fake_gpus, launcher, tmp_path):
    """The losses equal those of CPU ranks, which fetch the rows of a step at its start."""
    fetched_ahead = losses_on(launcher, tmp_path / "gpu", TWO_H100)
    fetched_at_start = losses_on(launcher, tmp_path / "cpu", TWO_CORES, "cluster.world_size=2")
    assert fetched_ahead.loss == pytest.approx(fetched_at_start.loss, rel=1e-6)


def break_the_rules(job, log):
    """Run code that a CPU permits and a GPU does not, on a rank."""
    device = join(job)
    on_device, on_host = torch.ones(3, device=device), torch.ones(3)
    rules = {
        "mixed": lambda: on_device + on_host,
        "numpy": on_device.numpy,
        "pin": on_device.pin_memory,
        "number": lambda: on_device * torch.tensor(2.0),
        "pinned": lambda: on_host.pin_memory().to(device, non_blocking=True) + on_device,
    }
    legal = []
    for name, act in rules.items():
        with suppress(RuntimeError, TypeError):
            act()
            legal.append(name)
    CUDA.is_counting = True
    torch.tensor([1, 2], device=device)
    on_device.sum().item()
    on_host.to(device)
    on_host.pin_memory()[1:].to(device, non_blocking=True)
    on_device.to("cpu", non_blocking=True)
    CUDA.is_counting = False
    own, other = torch.ones(4, device=device), torch.empty(4, device=device)
    ops = [dist.P2POp(dist.isend, own, 1 - job.rank), dist.P2POp(dist.irecv, other, 1 - job.rank)]
    works = dist.batch_isend_irecv(ops)
    other.sum()
    own.add_(1)
    for work in works:
        work.wait()
    other.sum()
    finish_together(device)
    return {"legal": legal, "device": str(device_of(torch.nn.Linear(1, 1)))}


def test_fake_raises_and_records_like_a_gpu(fake_gpus, launcher, tmp_path):
    end, _ = launcher.run(fake_cell(), tmp_path, entry=break_the_rules)
    assert end.report is not None, end.log_tail
    assert end.report["device"] == "cuda:0"
    assert end.report["legal"] == ["number", "pinned"]
    notes = notes_of(tmp_path)
    waits = [name.partition(" in ")[0] for name in notes[0]["waits"]]
    assert waits == ["tensor", "item", "to from pageable memory"]
    assert [problem.partition(",")[0] for problem in problems(notes)] == [
        f"rank {rank}: {fault}"
        for rank in (0, 1)
        for fault in ("sum uses what recv receives", "add_ changes what send sends")
    ]


def observe_a_loop(job, log):
    """Train a DistributedDataParallel model in the user's own loop under `bench.observe`, on a rank."""
    device = join(job)
    model = empty_model(fake_cell().model, attention_name="sdpa", max_positions=64)
    for _ in fill_layers(model, model_weights(fake_cell().model, 0), device):
        pass
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(ONE_STEP.steps_needed):
        ids = torch.randint(256, (1, 64), device=device)
        with bench.observe(model, folder=job.folder / "observed", steps=1, warmup_steps=0, report=False):
            model(input_ids=ids).logits.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finish_together(device)
    return {}


def test_own_training_loop_is_observed(fake_gpus, launcher, tmp_path):
    ends = launcher.run(fake_cell(), tmp_path, entry=observe_a_loop)
    assert all(end.report is not None for end in ends), ends[0].log_tail
    (record,) = read_lines(tmp_path / "observed" / "records.jsonl")
    assert record["status"] == "ok", record["reason"]
    assert record["trace"]["failure"] is None
    assert min(record["memory"]["peak_allocated_bytes"]) > 0
    assert problems(notes_of(tmp_path)) == []


def place_models(job, log):
    """Return the parameters that a rank holds, and their side, before a training stack takes the model."""
    device, placed = join(job), {}
    for engine in ("ddp", "fsdp2", "zero3"):
        cell = fake_cell("strategy=local", f"engine={engine}", "trainer=accelerate", "dp_shard=2")
        prepare_accelerate(cell)
        model = empty_model(cell.model, attention_name="sdpa", max_positions=cell.seq_len)
        layers = fill_layers(model, model_weights(cell.model, 0), device)
        placed_model = STACK_ENGINES[engine](cell, make_groups(cell)).place(model, layers, device)
        parameters = [*placed_model.parameters()]
        sides = {vars(parameter).get("_side") for parameter in parameters}
        placed[engine] = [sum(parameter.numel() for parameter in parameters), *sides]
    return placed


def test_no_gpu_holds_the_whole_model_if_a_stack_shards_it(fake_gpus, launcher, tmp_path):
    ends = launcher.run(fake_cell(), tmp_path, entry=place_models)
    assert all(end.report is not None for end in ends), ends[0].log_tail
    for end in ends:
        whole, side = end.report["ddp"]
        assert (whole > 0, side) == (True, "device")
        assert end.report["fsdp2"] == [whole, "host"]
        assert end.report["zero3"][0] == 0


def call(kind, sizes, peer=None):
    return ["0", [0, 1], kind, peer, sizes]


UNEQUAL = "call 0 of group 0 is ('allreduce', (3,)) on"
REDUCED, SENT = call("allreduce", [3]), call("send", [3], 1)


@pytest.mark.parametrize(
    ("calls", "beginnings"),
    [
        (([REDUCED], [call("broadcast", [3])]), [UNEQUAL]),
        (([REDUCED], [call("allreduce", [4])]), [UNEQUAL]),
        (([REDUCED], []), [UNEQUAL]),
        (([SENT], [call("recv", [4], 0)]), ["rank 0 sends [[3]] to rank 1, which receives"]),
        (([call("alltoall_base", [3])], [call("alltoall_base", [5])]), []),
    ],
)
def test_problems_compares_the_calls_of_the_ranks(calls, beginnings):
    found = problems([{"faults": [], "calls": of_rank} for of_rank in calls])
    assert [text[: len(start)] for text, start in zip(found, beginnings, strict=True)] == beginnings


class OnGpu(torch.Tensor):
    """CPU tensor that reports a GPU as its device; operators treat it as a CPU tensor."""

    device = property(lambda _: torch.device("cuda", 0))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.OpOverloadPacket):
            return func(*(plain(arg) if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)


@pytest.fixture
def cudnn_on_cpu():
    library = fake_cudnn.register_operators()
    yield
    library._destroy()


@pytest.mark.parametrize("name", ["cudnn", "torch_flash"])
def test_kernel_calls_its_gpu_operators(name, cudnn_on_cpu):
    """The operators are replaced by CPU code with the same arguments that computes the formula."""
    register_cpu_flash_operator()
    torch.manual_seed(0)
    *qkv, dout = (torch.randn(2, 4, 32, 16).as_subclass(OnGpu) for _ in range(4))
    transposed = dout.transpose(1, 2).contiguous().transpose(1, 2)
    found = {}
    with OnDevice(), torch.no_grad():
        for kernel in (KERNELS[name], KERNELS["math"]):
            out, lse = kernel.forward(*qkv, True, 0.25)
            tensors = [out, lse, *kernel.backward(transposed, *qkv, out, lse, True, 0.25)]
            found[kernel.name] = [*map(plain, tensors)]
    for ours, formula in zip(found[name], found["math"], strict=True):
        torch.testing.assert_close(ours, formula)


def test_synthetic_records_support_no_claim(fake_gpus, launcher, tmp_path):
    from analysis.cells.cells import SYNTHETIC_CAVEAT
    from analysis.compare import cell_changes  # imported here, because ranks import this file
    from analysis.read.archive import read_archive
    from analysis.report import write_report

    folder = tmp_path / "swept"
    raw = make_raw(*SHORT, "strategy=ring", "engine=ddp", "cluster.world_size=2", f"sweep_dir={folder}")
    whole = plan([raw], TWO_H100, single=False)
    run_plan(whole, launcher, Progress(Console(quiet=True)), write_report=write_report)
    archive, records = read_archive([folder], {}), read_records(folder / "records.jsonl")
    assert [(record.status, record.provenance) for record in records] == [("ok", "synthetic")]
    assert SYNTHETIC_CAVEAT in (folder / "summary.md").read_text() + (folder / "report.html").read_text()
    assert " is faster than " not in (folder / "report.html").read_text()
    assert cell_changes(archive, archive) == []
    for resume in (Resume.MATCHING, Resume.ANY):
        assert kept_records(replace(whole, resume=resume), records).records == []
