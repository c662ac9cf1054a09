"""ringmaster's code for GPUs, run on CPU ranks whose tensors report that they are on a GPU."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from tests.support.attention_cases import LIMITS, check_cases, errors_of
from tests.support.cells import INSTALLED, make_cell, tiny_cell
from tests.support.many_cells import look_inside, results_of_cells

NAME = "ringmaster_ring"
INSTALLED_ONLY = pytest.mark.skipif(NAME not in INSTALLED, reason="axolotl-ringmaster is not installed")
PACKED = ("data.packing=documents",)
ROTATIONS = STRATEGIES[NAME].options["rotation"]


def as_on_nccl(entry, job, log, *, on_a_gpu=False):
    """Run `entry` with the answers of NCCL, and of a GPU, to the package's queries of backend and device."""
    real_backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl" if real_backend(group) == "gloo" else real_backend(group)
    if on_a_gpu:
        torch.Tensor.is_cuda = property(lambda tensor: True)
    return entry(job, log)


def on_a_gpu(cell):
    return replace(cell, cluster=replace(cell.cluster, device="cuda", backend="nccl"))


def cell_of(rotation, mask, ranks):
    words = PACKED if mask == "documents" else ()
    return tiny_cell(
        f"strategy={NAME}", f"strategy.rotation={rotation}", f"cluster.world_size={ranks}", "seq_len=192",
        "model=qwen3_nano", "engine=fsdp2", "dtype=bf16", *words,
    )  # fmt: skip


@INSTALLED_ONLY
@pytest.mark.ranks
def test_ringmaster_flash_rings_match_float64_and_the_schedule(launcher, tmp_path, monkeypatch):
    """Errors are those of four ranks; bytes are exact on three and four, as odd rings balance work, too."""
    cases = [*itertools.product(ROTATIONS, ("causal", "documents"))]
    four = {case: cell_of(*case, 4) for case in cases}
    errors = errors_of(launcher, tmp_path, four, entry=partial(as_on_nccl, check_cases, on_a_gpu=True))
    assert {case: error for case, error in errors.items() if max(error.values()) > LIMITS["bf16"]} == {}
    cells = {f"{case} on {ranks}": cell_of(*case, ranks) for case in cases for ranks in (3, 4)}
    assert {name: refusal(on_a_gpu(cell)) for name, cell in cells.items()} == dict.fromkeys(cells)
    monkeypatch.setattr("tests.support.many_cells.refusal", lambda cell: None)
    seen = results_of_cells(launcher, tmp_path, cells, partial(as_on_nccl, look_inside, on_a_gpu=True))
    for name, cell in cells.items():
        sent = [rank["sent_bytes"]["attention"] for rank in seen[name]]
        formula = [
            STRATEGIES[NAME].rank_communication_bytes(on_a_gpu(cell), rank) for rank in range(len(sent))
        ]
        assert sent == formula, name


@pytest.mark.ranks
@pytest.mark.parametrize("heads", ["model.num_kv_heads=4", "model.num_kv_heads=2"])
@pytest.mark.parametrize("name", [name for name in INSTALLED if name.startswith("ringmaster")])
def test_ringmaster_bytes_on_nccl_match_the_schedule(launcher, tmp_path, name, heads):
    """The package uses other collectives on gloo; here gloo runs those of NCCL."""
    ranks = 2 if name == "ringmaster_ulysses" else 4
    words = ("model=qwen3_nano", heads, "engine=ddp", "dtype=fp32", f"cluster.world_size={ranks}")
    cell = tiny_cell(f"strategy={name}", *words)
    seen = results_of_cells(launcher, tmp_path, {name: cell}, partial(as_on_nccl, look_inside))[name]
    sent = {rank["sent_bytes"]["attention"] for rank in seen}
    on_nccl = replace(cell, cluster=replace(cell.cluster, backend="nccl"))
    assert sent == {STRATEGIES[name].communication_bytes(on_nccl)}
    assert sent != {STRATEGIES[name].communication_bytes(cell)}


REFUSED = {
    "head_tail needs a GPU": (("strategy.rotation=head_tail",), "needs a GPU"),
    "head_tail is zigzag": (("strategy.rotation=head_tail", "layout=contiguous"), "choose layout=zigzag"),
    "the others are not": (("layout=zigzag",), "choose layout=contiguous"),
    "a balanced ring is causal": (
        ("strategy.rotation=distflash", "workload=attention", "workload.mask=full"),
        "take workload.mask=causal",
    ),
    "distflash repeats no KV head on a CPU": (
        ("strategy.rotation=distflash", "dtype=fp32"),
        "does not repeat KV heads",
    ),
    "computed scores need kernel=math": (("strategy.rotation=p2p",), "take kernel=math"),
    "computed scores under autocast": (
        ("strategy.rotation=p2p", "kernel=math", "engine=ddp"),
        "take engine=fsdp2 or zero3",
    ),
    "computed scores rounded as in flash kernels": (
        ("strategy.rotation=distflash", "kernel=math", "engine=fsdp2", "model.num_kv_heads=4"),
        "take kernel=torch_flash",
    ),
    "several packed sequences": (
        ("strategy.rotation=distflash", "dtype=fp32", "batch=2", *PACKED),
        "documents of the first; take batch=1",
    ),
    "documents on another kernel": (("kernel=flash_blocks", *PACKED), "take kernel=torch_flash"),
    "documents on one rank": (("cluster.world_size=1", *PACKED), "take strategy=local"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_ringmaster_cell_is_refused_with_a_way_out(case, monkeypatch):
    monkeypatch.setattr("bench.request.packages.installed_version", lambda package: "1.0")
    words, way_out = REFUSED[case]
    reason = refusal(make_cell(f"strategy={NAME}", "model=qwen3_nano", "cluster.world_size=2", *words))
    assert way_out in reason
