"""Gates compare bytes and shapes inside attention with the strategy's formula and the configuration."""

import pytest

from bench.strategies import STRATEGIES
from tests.support.cells import (
    CHECKS,
    INSTALLED,
    counted_and_expected_bytes,
    run_cell,
    tiny_cell,
    variants,
    words_for,
)
from tests.support.many_cells import results_of_cells, selected_params

CASES = {
    " ".join((name, layout, *(value for _, value in options))): (
        f"strategy={name}",
        f"layout={layout}",
        *(f"strategy.{key}={value}" for key, value in options),
        *words_for(name, options),
    )
    for name in INSTALLED
    for layout, options in variants(STRATEGIES[name])
    if not {("rotation", "head_tail"), ("offload", "true")} & {*options}  # for GPUs: tests/bench/strategies
}

ONLY_CHECKPOINTED = "strategy.checkpoints=attention_output"
CASES_AND_FLAGS = [
    pytest.param(
        (*words, "engine=ddp", f"checkpointing={flag}", ("batch=2", "grad_accum=2")[number % 2]),
        id=f"{case}-{flag}",
        marks=() if (number + (flag == "true")) % 2 else pytest.mark.slow,
    )
    for number, (case, words) in enumerate(CASES.items())
    for flag in ("false", "true")
    if flag == "true" or ONLY_CHECKPOINTED not in words
]
CASES_AND_FLAGS += [
    pytest.param(("strategy=deepspeed_ulysses", "data.packing=documents", "engine=ddp", "grad_accum=2"))
]


@pytest.fixture(scope="module")
def cells(request):
    """Return the cells of the selected tests, by their words."""
    return {
        " ".join(words): tiny_cell("cluster.world_size=4", *words)
        for words in selected_params(request, "inside", "words")
    }


@pytest.fixture(scope="module")
def inside(launcher, tmp_path_factory, cells):
    """Return the shapes and bytes inside attention in one step, by cell and rank."""
    return results_of_cells(launcher, tmp_path_factory.mktemp("cells"), cells)


@pytest.mark.parametrize("words", CASES_AND_FLAGS)
def test_attention_sends_the_bytes_of_its_formula(cells, inside, words):
    cell, ranks = cells[" ".join(words)], inside[" ".join(words)]
    sent, facts = [rank["sent_bytes"].get("attention", 0) for rank in ranks], STRATEGIES[cell.strategy]
    assert sent == [facts.rank_communication_bytes(cell, rank % cell.sp_degree) for rank in range(len(ranks))]
    assert max(sent) == facts.communication_bytes(cell)
    assert (sent[0] > 0) == (cell.sp_degree > 1)
    shape = [cell.shard_len, cell.model.num_heads, cell.model.num_kv_heads]
    assert [rank["shapes"] for rank in ranks] == [[shape]] * cell.cluster.world_size


@pytest.mark.parametrize(
    ("rotation", "kinds"), [("allgather", {"all_gather", "all_to_all"}), ("alltoall", {"all_to_all"})]
)
def test_torch_cp_record_shows_which_rotation_ran(launcher, tmp_path, rotation, kinds):
    cell = tiny_cell(
        "strategy=torch_cp", f"strategy.rotation={rotation}", "engine=ddp", "cluster.world_size=2"
    )
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert record.config["strategy.rotation"] == rotation
    calls = record.engagement.calls
    assert {call.split()[1] for call in calls if call.startswith("attention")} == kinds
    counted, computed = counted_and_expected_bytes(record)
    assert counted == computed


PURPOSES = {"ddp": {"gradients"}, "fsdp2": {"gradients", "parameters"}, "zero3": {"parameters"}}


@pytest.mark.parametrize("words", [pytest.param((f"engine={engine}",), id=engine) for engine in PURPOSES])
def test_engine_communication_is_not_counted_as_attention(cells, inside, words):
    cell, sent = cells[" ".join(words)], inside[" ".join(words)][0]["sent_bytes"]
    assert PURPOSES[cell.engine.name] <= {purpose for purpose, size in sent.items() if size}
    assert sent["attention"] == STRATEGIES[cell.strategy].communication_bytes(cell)
