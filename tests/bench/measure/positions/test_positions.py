"""The positions pass compares cos and sin of a rank with those of the whole sequence, and names the model."""

import copy
import pickle
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.qwen2 import modeling_qwen2

from bench.attention.layouts import LAYOUTS
from bench.measure import PASSES
from bench.measure.facts import RankReport
from bench.measure.positions.rank import SEVERAL_ROWS, PositionsPass
from bench.ranks.log import RankLog
from tests.support.cells import make_cell

TOKENS, RANKS = 512, 4
CELL = make_cell("strategy=ulysses", "seq_len=512", "sp_degree=2", "cluster.world_size=2")
FACTS = PASSES["positions"]
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "mscale": 0.7,
}  # fmt: skip


def model_of(family, rope=None):
    rope = {"rope_parameters": {**rope}} if rope else {}
    torch.manual_seed(0)
    most = {"max_position_embeddings": 128}
    return AutoModel.from_config(AutoConfig.for_model(family, **SMALL, **most, **rope, pad_token_id=0))


def part_of(model, positions, position_ids=None, *, ranks=RANKS, trainer=None):
    """Return the part of a rank that holds `positions` and calls its model with `position_ids`."""
    subject = SimpleNamespace(
        network=model, sequence_ranks=ranks, input_positions=lambda: positions, trainer=trainer
    )
    positions_pass = PositionsPass(SimpleNamespace(subject=subject, log=RankLog(lambda _: None)))
    with positions_pass.around_inspected_step():
        position_ids = positions[None] if position_ids is None else position_ids
        model(input_ids=torch.ones(1, positions.shape[-1], dtype=torch.long), position_ids=position_ids)
        pickle.dumps(copy.deepcopy(model))  # a training loop may do this within a step
    return positions_pass.part()


def shard_of(rank, layout="zigzag", ranks=RANKS):
    return torch.cat([torch.arange(TOKENS)[piece] for piece in LAYOUTS[layout].slices(TOKENS, ranks, rank)])


def gate_of(parts):
    reports = [RankReport({"positions": part}, {}) for part in parts]
    return FACTS.gate(CELL, FACTS.merge(reports, CELL))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", [None, YARN], ids=["default", "yarn"])
def test_frequencies_without_a_length_are_equal_on_every_rank(layout, rope):
    parts = [part_of(model_of("qwen3", rope), shard_of(rank, layout)) for rank in range(RANKS)]
    assert {(part.compared, part.error[0] < 1e-6, part.reason) for part in parts} == {(1, True, None)}
    assert gate_of(parts) is None


@pytest.mark.parametrize(
    ("family", "rope", "wrong"), [("qwen2", DYNAMIC, 3), ("llama", LONGROPE, 1), ("mistral", LONGROPE, 1)]
)
def test_frequencies_by_the_largest_position_blame_the_model(family, rope, wrong):
    """With contiguous shards and longrope, only rank 0 has positions within the length of training."""
    parts = [part_of(model_of(family, rope), shard_of(rank, "contiguous")) for rank in range(RANKS)]
    assert [part.module[0] for part in parts] == ["rotary_emb"] * wrong + [None] * (RANKS - wrong)
    reason = gate_of(parts)
    assert reason.startswith("positions: rank 0 rotates position 1 ")
    assert "not the strategy" in reason
    assert f"(rope_type={rope['rope_type']}) chooses frequencies by the largest position" in reason
    assert "such as yarn" in reason


def test_model_is_restored_after_the_whole_sequence():
    model, positions = model_of("llama", LONGROPE), torch.arange(64)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert part_of(model, positions).module == ["rotary_emb"]
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_of_a_cell_rotates_by_the_pair(family, dtype):
    model = model_of(family, YARN).to(dtype)
    code = sys.modules[type(model).__module__]
    rotate = code.apply_rotary_pos_emb
    part = part_of(model, shard_of(1), trainer="native")
    assert (part.rotations, part.module) == (2, [None])
    assert code.apply_rotary_pos_emb is rotate
    assert part_of(model, shard_of(1)).rotations == 0


def pass_on_shifted_keys(plain, q, k, cos, sin):
    return plain(q, k, cos, sin)[0], plain(q, k, cos.roll(1, dims=-2), sin.roll(1, dims=-2))[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_rotated_otherwise_are_found(monkeypatch, dtype):
    plain = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", partial(pass_on_shifted_keys, plain))
    part = part_of(model_of("qwen2", DYNAMIC).to(dtype), shard_of(0, "contiguous"), trainer="native")
    assert (part.module, part.position) == (["rotary_emb"], [1])
    part = part_of(model_of("qwen2").to(dtype), shard_of(2), trainer="native")
    assert (part.module, part.position) == (["layers.0.self_attn"], [128])
    assert "layers.0.self_attn does not rotate by the position_ids" in gate_of([part])


@pytest.mark.parametrize(("name", "compared"), [("input_layernorm", 1), ("self_attn.q_proj", 2)])
def test_queries_that_are_not_finite_are_not_compared(name, compared):
    model = model_of("qwen3")
    model.layers[1].get_submodule(name).weight.data[:] = torch.inf
    part = part_of(model, shard_of(1), trainer="native")
    assert (part.rotations, part.module) == (compared, [None])


class Counting(nn.Module):
    """A rotary embedding for whole sequences, which counts tokens and ignores their positions."""

    def forward(self, x, position_ids=None):
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(2)
        return angles.cos()[None].to(x.dtype), angles.sin()[None].to(x.dtype)


class Offset(nn.Module):
    """A rotary embedding that adds the start of the shard to positions that already contain it."""

    def forward(self, x, position_ids):
        angles = (position_ids + position_ids[:, :1])[..., None] * torch.tensor([1.0, 0.1]).repeat(4)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("rotary", [Counting, Offset])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_position_ids_is_blamed(rotary, dtype):
    parts = []
    for rank in range(2):
        model = model_of("qwen3").to(dtype)
        model.rotary_emb = rotary()
        parts.append(part_of(model, shard_of(rank, "contiguous", ranks=2), ranks=2))
    assert [part.position for part in parts] == [[None], [256]]
    assert "rank 1 rotates position 256" in gate_of(parts)
    assert "does not rotate by the position_ids" in gate_of(parts)


def test_positions_that_restart_are_compared_within_documents():
    positions = torch.cat([torch.arange(100), torch.arange(28)])
    part = part_of(model_of("qwen3", DYNAMIC), positions)
    assert (part.compared, part.module) == (1, [None])


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


@pytest.mark.parametrize(("shift", "wrong"), [(0, None), (1, 128)])
def test_rows_of_time_height_and_width_are_compared(shift, wrong):
    positions = torch.arange(128, 256)
    rows = torch.stack([positions, 128 + positions // 8, 128 + positions % 8])
    part = part_of(model_of("qwen2_5_vl_text", MROPE), rows, (rows + shift)[:, None])
    assert (part.compared, part.reason, part.position) == (1, None, [wrong])


def test_rows_of_positions_that_differ_are_not_compared():
    model, positions = model_of("qwen2_5_vl_text", MROPE), torch.arange(128, 256)
    assert part_of(model, positions, positions.expand(3, 1, -1)).compared == 1
    rows = torch.stack([positions, positions // 8, positions % 8])[:, None]
    part = part_of(model, positions, rows)
    assert (part.compared, SEVERAL_ROWS in part.reason) == (0, True)
    section = FACTS.merge([RankReport({"positions": part}, {})], CELL)
    assert FACTS.gate(CELL, section) is None
    assert SEVERAL_ROWS in FACTS.checks(CELL, section)[0].reason
