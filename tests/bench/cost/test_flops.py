"""FLOPs against arithmetic by hand and torch's counter."""

import pytest
import torch
from msgspec.structs import asdict
from torch.utils.flop_counter import FlopCounterMode

from bench.cost.flops import attention_forward_flops, causal_area, hardware_flops
from bench.measure.documents.section import DocumentsSection
from bench.run.cell.outcome import analytic
from bench.strategies import STRATEGIES
from bench.training.models import build_model
from bench.training.parameters import matrix_parameters
from tests.support.cells import make_cell
from tests.support.many_cells import count_products, results_of_cells


def test_matrix_parameters_match_torchs_flop_counter():
    cell = make_cell("seq_len=64")
    model = build_model(cell.model, attention_name="sdpa", max_positions=64, seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    # Rotary angles are a batched product in some versions of transformers.
    dense = sum(flops for operator, flops in counted.items() if str(operator) in ("aten.mm", "aten.addmm"))
    assert dense == 2 * matrix_parameters(cell.model) * 64


EXECUTED = [
    ("checkpointing=false",),
    ("checkpointing=true",),
    ("tiled_mlp=true",),
    ("checkpointing=true", "tiled_mlp=true", "grad_accum=2", "batch=2"),
    ("checkpointing=true", "tiled_mlp=true", "seq_len=64", "loss=untiled"),
    ("checkpointing=true", "offload.activations=true", "dtype=fp32"),
]


def test_hardware_flops_are_those_that_ranks_execute(launcher, tmp_path):
    """Compare the products outside attention; the last tile of an MLP has 21, 42 or all 64 tokens."""
    cells = {
        f"{engine} {' '.join(words)}": make_cell("seq_len=149", "strategy=local", f"engine={engine}", *words)
        for engine in ("ddp", "fsdp2", "zero3")
        for words in EXECUTED
    }
    counted = results_of_cells(launcher, tmp_path, cells, count_products)
    assert counted == {name: [_products(cell)] for name, cell in cells.items()}


def _products(cell):
    """Return the FLOPs of a cell outside attention."""
    attention = attention_forward_flops(cell, causal=True)
    return hardware_flops(cell, causal=True) - int(attention * (3.5 + cell.checkpointing))


def packed(cell, pairs, computed):
    section = DocumentsSection(documents=[2], pairs=pairs, computed_pairs=computed, area=[[1]], imbalance=1.0)
    return analytic(cell, {"documents": section})


def test_packed_documents_count_one_score_square_each():
    """Documents of 24 and 40 tokens, in the mean step, count like two cells of these lengths."""
    cell = make_cell("seq_len=64", "strategy=local", "data.packing=documents")
    pairs = 24 * 25 // 2 + 40 * 41 // 2
    found = asdict(packed(cell, [pairs - 1, pairs + 1], [pairs, pairs]))
    parts = [asdict(analytic(make_cell(f"seq_len={n}", "strategy=local"))) for n in (24, 40)]
    names = [name for name in found if name.endswith(("causal", "full"))]
    assert len(names) == 4
    assert {name: found[name] for name in names} == {
        name: sum(part[name] for part in parts) for name in names
    }
    assert {getattr(analytic(cell), name) for name in names} == {None}


def test_positions_of_a_loop_count_one_triangle_per_document():
    """A loop has no packing in its cell; positions of two ranks, in any order, restart in documents."""
    cell = make_cell("seq_len=64", "strategy=ulysses", "cluster.world_size=2", "grad_accum=3")
    positions = [*range(24), *range(40)]
    section = DocumentsSection.from_positions([positions[::2], positions[1::2]], cell.grad_accum)
    assert section.documents == [6]
    found = analytic(cell, {"documents": section})
    parts = [analytic(make_cell(f"seq_len={n}", "strategy=local", "grad_accum=3")) for n in (24, 40)]
    assert found.model_flops_causal == sum(part.model_flops_causal for part in parts)
    whole = DocumentsSection.from_positions([range(64)], cell.grad_accum)
    assert analytic(cell, {"documents": whole}) == analytic(cell)


def test_padding_counts_in_hardware_flops_only():
    words = ("cluster.world_size=4", "strategy=ring", "data.packing=documents", "pad=true")
    cell, whole = make_cell("seq_len=250", *words), make_cell("seq_len=250", "strategy=local")
    found = packed(cell, [250 * 251 // 2], [250 * 251 // 2 + 6 * 7 // 2])
    assert found.model_flops_causal == analytic(whole).model_flops_causal
    added = {n: analytic(make_cell(f"seq_len={n}", "strategy=local")).hardware_flops_causal for n in (6, 250)}
    assert found.hardware_flops_causal == added[250] + added[6]
    unpacked = make_cell("seq_len=250", *words[:2], "pad=true")
    assert hardware_flops(unpacked, causal=True) == hardware_flops(
        make_cell("seq_len=256", *words[:2]), causal=True
    )


@pytest.mark.parametrize("kind", ["model", "hardware"])
def test_analytic_has_flops_with_and_without_the_mask(kind):
    stored = analytic(make_cell("seq_len=64", "strategy=local"))
    passes = {"model": 3, "hardware": 3.5}[
        kind
    ]  # times attention's forward; hardware FLOPs include recomputed scores
    masked = 4 * (64**2 - 64 * 65 // 2) * 4 * 16
    assert getattr(stored, f"{kind}_flops_full") - getattr(stored, f"{kind}_flops_causal") == passes * masked


def areas(*words):
    cell = make_cell(*words, "cluster.world_size=4", "seq_len=64")
    return cell, [causal_area(cell, rank) for rank in range(4)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_causal_area_of_a_ring_counts_keys_of_its_own_queries(layout):
    cell, found = areas("strategy=ring", f"layout={layout}")
    facts = STRATEGIES["ring"]
    counted = [
        sum(position + 1 for piece in facts.slices(cell, 64, rank) for position in range(64)[piece])
        for rank in range(4)
    ]
    assert found == [cell.model.num_heads * pairs for pairs in counted]


def test_causal_area_is_equal_on_ranks_that_split_heads():
    words = ("strategy=usp", "ulysses_degree=2", "layout=contiguous")
    by_inner = {}
    for inner in ("ulysses", "ring"):
        cell, by_inner[inner] = areas(*words, f"strategy.inner={inner}")
        assert sum(by_inner[inner]) == cell.model.num_heads * 64 * 65 // 2
    first, _, last, _ = by_inner["ulysses"]
    assert by_inner == {"ulysses": [first, first, last, last], "ring": [first, last, first, last]}
    assert first < last
