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
from tests.support.cells import make_cell

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
            SimpleNamespace(cell=cell, data=data, strategy=SimpleNamespace(groups=groups)), 3
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
