"""Live blocks are classified by role, dtype and shape without any tensor operation."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from bench.measure.memory import live_blocks
from bench.measure.memory.live_blocks import MAX_CLASSES, largest_block_classes

MIB = 2**20
# Odd sizes, so that no other tensor in this process is of the same class.
PARAMETER, BATCH = [1021, 1031], [509, 1031]


@pytest.fixture
def all_classes(monkeypatch):
    """Report all classes, also those smaller than tensors that earlier tests of this process left."""
    monkeypatch.setattr(live_blocks, "MAX_CLASSES", 10_000)


def classes():
    return {(block.role, block.dtype, tuple(block.shape)): block for block in largest_block_classes("cpu")}


@pytest.mark.usefixtures("all_classes")
def test_blocks_are_classified_by_role():
    model = torch.nn.Linear(PARAMETER[1], PARAMETER[0], bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(BATCH)).sum().backward()
    optimizer.step()
    found = classes()
    size = 4 * PARAMETER[0] * PARAMETER[1]
    assert found["parameter", "float32", tuple(PARAMETER)].total_bytes == size
    assert found["gradient", "float32", tuple(PARAMETER)].total_bytes == size
    state = found["optimizer state", "float32", tuple(PARAMETER)]
    assert (state.count, state.total_bytes) == (2, 2 * size)


@pytest.mark.usefixtures("all_classes")
def test_activations_saved_in_the_graph_are_classified():
    x = torch.zeros(BATCH, requires_grad=True)
    loss = (x.exp() * 2).exp().sum()
    found = classes()["activation", "float32", tuple(BATCH)]
    assert (found.count, found.total_bytes) == (2, 2 * 4 * BATCH[0] * BATCH[1])
    loss.backward()
    assert ("activation", "float32", tuple(BATCH)) not in classes()


def test_checkpoint_is_not_recomputed():
    calls = []

    def forward(x):
        calls.append(x)
        return x.exp().sum()

    loss = checkpoint(forward, torch.zeros(BATCH, requires_grad=True), use_reentrant=False)
    largest_block_classes("cpu")
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_views_count_once_and_the_largest_class_is_first():
    block = torch.zeros(64 * MIB, dtype=torch.uint8)
    views = [block[i:] for i in range(1000)]
    with FakeTensorMode():
        without_memory = [torch.zeros(2**40), torch.zeros(2**40, device="meta")]
    found = largest_block_classes("cpu")
    assert (found[0].count, found[0].total_bytes, found[0].shape) == (1, 64 * MIB, [64 * MIB])
    assert (len(views), len(without_memory)) == (1000, 2)
    assert len(found) <= MAX_CLASSES
    assert [c.total_bytes for c in found] == sorted((c.total_bytes for c in found), reverse=True)
