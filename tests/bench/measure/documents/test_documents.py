"""The documents pass counts the keys that each query sees, token by token."""

from types import SimpleNamespace

import pytest
import torch

from bench.measure import PASSES
from bench.measure.documents.rank import count_documents
from bench.measure.documents.section import DocumentsSection
from bench.measure.facts import RankReport
from bench.strategies import STRATEGIES
from bench.training.data import open_data
from tests.support.cells import CHECKS, make_cell, run_cell, tiny_cell
from tests.support.text_data import write_rows

WORDS = ("seq_len=90", "pad=true", "data=synthetic", "data.packing=documents", "cluster.world_size=4")
SPREADS = {
    "ring": ("strategy=ring", "batch=2"),
    "usp": ("strategy=usp", "ulysses_degree=2", "layout=contiguous"),
    "two rings": ("strategy=ring", "sp_degree=2", "dp_shard=2", "grad_accum=2"),
}


def parts_of(cell):
    """Yield every rank's part of three steps."""
    data = open_data(cell, torch.device("cpu"))
    for rank in range(4):
        data_rank, sequence_rank = divmod(rank, cell.sp_degree)
        groups = SimpleNamespace(data_rank=data_rank, sequence_rank=sequence_rank)
        yield count_documents(
            SimpleNamespace(cell=cell, data=data, strategy=SimpleNamespace(groups=groups)), range(3)
        )


@pytest.mark.parametrize("spread", SPREADS)
def test_document_areas_of_all_ranks_add_up_to_the_visible_pairs(spread):
    cell = make_cell(*WORDS, *SPREADS[spread])
    parts = [*parts_of(cell)]
    section = PASSES["documents"].merge([RankReport({"documents": part}, {}) for part in parts], cell)
    assert cell.padding > 0
    for step in range(3):
        whole = open_data(cell, torch.device("cpu")).whole_step(step, cell.padded_len)
        # A token at position p of its document sees p + 1 keys; tokens from the 91st on are padding.
        keys_seen = torch.cat([batch.position_ids + 1 for batch in whole])
        assert section.pairs[step] == keys_seen[:, :90].sum()
        assert section.computed_pairs[step] == keys_seen.sum()
        assert sum(areas[step] for areas in section.area) == keys_seen.sum() * cell.model.num_heads
        for rank in range(4) if cell.strategy == "ring" and cell.sp_degree == 4 else ():
            pieces = STRATEGIES["ring"].slices(cell, cell.padded_len, rank)
            pairs = sum(int(keys_seen[:, piece].sum()) for piece in pieces)
            assert section.area[rank][step] == pairs * cell.model.num_heads
    assert section.imbalance > 1


def test_imbalance_is_the_median_over_steps():
    """Busy ranks of different steps do not cancel: each step compares its busiest rank with its mean."""
    areas = [10, 6, 5], [4, 10, 10]
    parts = [DocumentsSection(documents=[], pairs=[], computed_pairs=[], area=[area]) for area in areas]
    section = PASSES["documents"].merge([RankReport({"documents": part}, {}) for part in parts], make_cell())
    assert (section.area, section.imbalance) == ([*areas], pytest.approx(10 / 7.5))


def test_flops_of_a_cell_count_the_documents_of_its_timed_steps(launcher, tmp_path):
    """Texts of uneven lengths fill 256 tokens; a sample starts with the text after the one that was cut."""
    lengths, position, pairs = (200, 3, 120, 1, 64, 255, 30, 90, 17), 0, []
    write_rows(tmp_path / "texts.jsonl", [{"text": "x" * length} for length in lengths])
    for _ in range(3):
        left, step = 256, 0
        while left > 0:
            n = min(left, lengths[position % len(lengths)])
            left, step, position = left - n, step + n * (n + 1) // 2, position + 1
        pairs.append(step)
    cell = tiny_cell(
        "strategy=ulysses", "cluster.world_size=2", "data=text", f"data.path={tmp_path}/texts.jsonl",
        "data.packing=documents", "measure.budget_s=60", "measure.warmup_s=0", "measure.steps=2", "seed=0",
        "loss=untiled", "checkpointing=false",
    )  # fmt: skip
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert (record.status, record.reason, record.timing.warmup) == ("ok", None, "full")
    assert record.documents.pairs == pairs[1:]
    model = cell.model
    attention = 4 * (sum(pairs[1:]) // 2) * model.num_layers * model.num_heads * model.head_dim
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    linear = 2 * 256 * (model.num_layers * layer + model.hidden_size * model.vocab_size)
    assert record.analytic.model_flops_causal == 3 * (linear + attention)
    assert record.analytic.hardware_flops_causal == 3 * linear + 3.5 * attention
