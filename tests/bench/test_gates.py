"""No number without a check in front of it: bytes by formula, shapes by configuration, tokens by digest."""

import pytest

from bench.strategies import STRATEGIES
from tests import faults
from tests.cells import run_cell, tiny_cell

CASES = {
    f"{name} {layout}": (f"strategy={name}", f"layout={layout}")
    for name, facts in STRATEGIES.items()
    for layout in facts.layouts
}


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("case", CASES)
def test_attention_exchanges_the_bytes_of_its_formula(launcher, tmp_path, case, checkpointing):
    words = (*CASES[case], "engine=ddp", "cluster.world_size=4", f"checkpointing={checkpointing}")
    cell = tiny_cell(*words, "batch=2", "grad_accum=2")
    record, _ = run_cell(launcher, cell, tmp_path)
    assert record.status == "ok", record.reason
    sent = record.engagement.sent_bytes.get("attention", [0])
    assert set(sent) == {STRATEGIES[cell.strategy].exchange_bytes(cell)}
    assert (sent[0] > 0) == (cell.sp_degree > 1)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_the_engines_own_traffic_is_not_booked_as_attention(launcher, tmp_path, engine):
    record, _ = run_cell(launcher, tiny_cell(f"engine={engine}", "cluster.world_size=4"), tmp_path)
    assert record.status == "ok", record.reason
    expected = {"ddp": {"gradients"}, "fsdp2": {"gradients", "parameters"}, "zero3": {"parameters"}}
    assert expected[engine] <= {purpose for purpose, sent in record.engagement.sent_bytes.items() if sent[0]}


MUTATIONS = {
    faults.forget_to_shard_rank_1: ("ulysses", "other tokens"),
    faults.attend_locally: ("ulysses", "was not applied as configured"),
    faults.drop_a_ring_step: ("ring", "was not applied as configured"),
    faults.contiguous_positions_with_zigzag: ("ring", "other tokens"),
}


@pytest.mark.parametrize("fault", MUTATIONS, ids=lambda fault: fault.__name__)
def test_a_strategy_that_does_not_do_what_was_asked_is_a_wrong_result(launcher, tmp_path, fault):
    strategy, reason = MUTATIONS[fault]
    cell = tiny_cell(f"strategy={strategy}", "engine=ddp", "cluster.world_size=4")
    record, _ = run_cell(launcher, cell, tmp_path, fault)
    assert record.status == "wrong_result"
    assert reason in record.reason
    assert record.timing is None
