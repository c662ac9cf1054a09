"""No number without a check in front of it: bytes by formula, shapes by configuration, tokens by digest."""

import re
from dataclasses import replace

import pytest

from bench.strategies import STRATEGIES
from tests import faults
from tests.cells import run_cell, tiny_cell, variants

CASES = {
    " ".join((name, layout, *(value for _, value in options))): (
        f"strategy={name}",
        f"layout={layout}",
        *(f"strategy.{key}={value}" for key, value in options),
    )
    for name, facts in STRATEGIES.items()
    for layout, options in variants(facts)
}


@pytest.mark.parametrize(
    ("case", "checkpointing"),
    [
        pytest.param(case, flag, marks=() if (number + flag) % 2 else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for flag in (False, True)
    ],
)
def test_attention_exchanges_the_bytes_of_its_formula(launcher, tmp_path, case, checkpointing):
    words = (
        *CASES[case],
        "engine=ddp",
        "cluster.world_size=4",
        f"checkpointing={str(checkpointing).lower()}",
    )
    cell = tiny_cell(*words, "batch=2", "grad_accum=2")
    record, _ = run_cell(launcher, cell, tmp_path)
    assert record.status == "ok", record.reason
    sent = record.sections["engagement"].sent_bytes.get("attention", [0])
    assert set(sent) == {STRATEGIES[cell.strategy].exchange_bytes(cell)}
    assert (sent[0] > 0) == (cell.sp_degree > 1)


@pytest.mark.parametrize(
    ("rotation", "kinds"), [("allgather", {"all_gather", "all_to_all"}), ("alltoall", {"all_to_all"})]
)
def test_the_record_shows_which_rotation_ran(launcher, tmp_path, rotation, kinds):
    cell = tiny_cell(
        "strategy=torch_cp", f"strategy.rotation={rotation}", "engine=ddp", "cluster.world_size=4"
    )
    record, _ = run_cell(launcher, cell, tmp_path)
    assert record.config["strategy.rotation"] == rotation
    seen = record.sections["engagement"].calls
    assert {call.split()[1] for call in seen if call.startswith("attention")} == kinds


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_the_engines_own_traffic_is_not_booked_as_attention(launcher, tmp_path, engine):
    record, _ = run_cell(launcher, tiny_cell(f"engine={engine}", "cluster.world_size=4"), tmp_path)
    assert record.status == "ok", record.reason
    expected = {"ddp": {"gradients"}, "fsdp2": {"gradients", "parameters"}, "zero3": {"parameters"}}
    assert expected[engine] <= {
        purpose for purpose, sent in record.sections["engagement"].sent_bytes.items() if sent[0]
    }


MUTATIONS = {
    faults.forget_to_shard_rank_1: (("strategy=ulysses",), "other tokens"),
    faults.contiguous_positions_with_zigzag: (("strategy=ring",), "positions are contiguous in zigzag"),
    faults.average_losses_over_ranks: (("strategy=ring",), "without weighting them by their token counts"),
    faults.divide_by_sp_degree: (("strategy=ulysses",), "gradients are exactly 1/sp_degree = 0.25"),
    faults.shift_labels_after_sharding: (("strategy=ulysses",), "labels are shifted after sharding"),
    faults.attend_locally: (("strategy=ulysses",), "every rank attends to its own shard only"),
    faults.drop_a_ring_step: (("strategy=ring",), "ring step 3 is dropped"),
    faults.see_one_token_too_far: (("strategy=ulysses", "kernel=math"), "each token sees its successor"),
    faults.skip_the_lse_rescale: (("strategy=ring",), "added without rescaling by their LSE"),
    faults.tile_the_kv_heads: (("strategy=ring",), "tiled over the query heads"),
    faults.sum_gradients_over_the_ranks: (("strategy=ulysses",), "dq is off .* exactly sp_degree = 4"),
    faults.reuse_the_first_block_in_backward: (("strategy=ring",), "dq is off"),
    faults.fill_a_permuted_buffer: (("strategy=ulysses",), "is off"),
}


@pytest.mark.parametrize("fault", MUTATIONS, ids=lambda fault: fault.__name__)
def test_a_strategy_that_does_not_do_what_was_asked_is_a_wrong_result(launcher, tmp_path, fault):
    words, reason = MUTATIONS[fault]
    cell = tiny_cell(*words, "engine=ddp", "cluster.world_size=4", "model=qwen3_nano", "model.num_heads=8")
    cell = replace(cell, model=replace(cell.model, num_kv_heads=4))
    record, _ = run_cell(launcher, cell, tmp_path, fault)
    assert record.status == "wrong_result", record.reason
    assert re.search(reason, record.reason)
    assert record.sections["timing"] is None
