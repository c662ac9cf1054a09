"""Cells are told apart by what differs and no more."""

import pytest

from bench.sweep.progress import CellLabels
from tests.cells import make_cell


@pytest.mark.parametrize(
    ("commands", "labels"),
    [
        ([["seq_len=1k"], ["seq_len=2k"]], ["ulysses 1k sp 2", "ulysses 2k sp 2"]),
        ([["engine=ddp"], ["engine=fsdp2"]], ["ulysses 8k sp 2 ddp", "ulysses 8k sp 2 fsdp2"]),
        ([["batch=1"], ["batch=2"]], ["ulysses 8k sp 2 batch=1", "ulysses 8k sp 2 batch=2"]),
        ([["seed=0"], ["seed=0", "strategy=local"]], ["ulysses 8k sp 2", "local 8k"]),
        (
            [["+env.NCCL_ALGO=Ring"], ["+env.NCCL_ALGO=Tree"]],
            ["ulysses 8k sp 2 env.NCCL_ALGO=Ring", "ulysses 8k sp 2 env.NCCL_ALGO=Tree"],
        ),
    ],
)
def test_a_label_names_what_sets_a_cell_apart_and_no_more(commands, labels):
    cells = [make_cell("strategy=ulysses", "cluster.world_size=2", *words) for words in commands]
    named = CellLabels(cells)
    assert [named.of(cell) for cell in cells] == labels


def test_what_follows_from_another_setting_is_not_named_and_repeats_are_not_set_apart():
    cells = [make_cell("strategy=ulysses", "sp_degree=2", f"cluster.world_size={n}") for n in (2, 4)]
    assert CellLabels(cells).of(cells[1]) == "ulysses 8k sp 2 cluster.world_size=4"
    assert CellLabels([cells[0], cells[0]]).of(cells[0]) == "ulysses 8k sp 2"
