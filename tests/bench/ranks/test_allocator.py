"""What is asked of CUDA's allocator is in effect, or the cell is refused."""

import re
from dataclasses import fields, replace

import pytest
import torch

from bench.passes.facts import RankReport
from bench.passes.memory.section import FACTS, RankMemory
from bench.ranks import allocator
from bench.ranks.allocator_settings import without_effect
from bench.ranks.log import RefusedError
from tests.cells import run_cell, tiny_cell

ASKED = (
    "expandable_segments:True,max_split_size_mb:256,garbage_collection_threshold:0.8,large_segment_size_mb:40"
)
REPORTED = {
    "PYTORCH_CUDA_ALLOC_CONF": ASKED,
    "max_split_size": 256 * 2**20,
    "garbage_collection_threshold": 0.8,
    "expandable_segments": True,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {str(2**n): 0 for n in range(16)},
}
"""As torch/csrc/cuda/Module.cpp puts it together."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "the allocator reports ''"),
        ({"expandable_segments": False}, "expandable_segments=False"),
        ({"max_split_size": -1}, "max_split_size=-1"),
        ({"garbage_collection_threshold": 0.0}, "garbage_collection_threshold=0.0"),
    ],
    ids=str,
)
def test_settings_are_in_effect_when_the_allocator_reports_all_of_them(change, said):
    found = without_effect(ASKED, REPORTED | change)
    assert found == said if said is None else said in found


def test_an_allocator_that_reports_nothing_proves_nothing():
    assert without_effect(ASKED, {}) == "the allocator reports no settings"


def test_a_rank_asks_torch_and_refuses_what_is_not_in_effect(monkeypatch):
    env = {"NCCL_ALGO": "Ring", "PYTORCH_CUDA_ALLOC_CONF": ASKED}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": REPORTED})
    allocator.refuse_without_effect(env)
    words = allocator.settings_in_words(torch.device("cuda", 0))
    assert (words["backend"], words["expandable_segments"]) == ("native", "True")
    assert merged(words).allocator_settings == words
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", dict)
    allocator.refuse_without_effect({"NCCL_ALGO": "Ring"})
    with pytest.raises(RefusedError, match=r"env\.PYTORCH_CUDA_ALLOC_CONF=expandable.* has no effect"):
        allocator.refuse_without_effect(env)
    assert allocator.settings_in_words(torch.device("cpu")) is None


def merged(allocator_settings):
    nothing = dict.fromkeys(each.name for each in fields(RankMemory))
    rank = RankMemory(**{**nothing, "allocator_settings": allocator_settings})
    return FACTS.merge([RankReport({"memory": rank}, {})] * 2, tiny_cell())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("expandable_segments:True", r"rank 0, join: .*_segments:True: has no effect .* reports no settings"),
        ("max_split_size_mb:1", r"rank 0, start: .*_mb:1: torch .* refuses it: .* must be >= 20"),
    ],
)
def test_a_cell_is_unsupported_where_torch_rejects_its_settings_or_does_not_report_them(
    launcher, tmp_path, settings, said
):
    """Ranks on a CPU have no such allocator, but torch parses its settings there, too."""
    cell = replace(tiny_cell("strategy=local", "engine=ddp"), env=(("PYTORCH_ALLOC_CONF", settings),))
    record, _ = run_cell(launcher, cell, tmp_path)
    assert record.status == "unsupported"
    assert re.fullmatch(said, record.reason)


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not say its settings"
)
def test_torch_takes_settings_after_it_has_read_its_environment():
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        allocator.set_allocator({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
