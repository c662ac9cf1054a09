"""No number without a check in front of it: bytes by formula, shapes by configuration, tokens by digest."""

import re
from dataclasses import replace

import pytest

from bench.strategies import STRATEGIES
from tests import faults
from tests.cells import CHECKS, counted_and_computed, run_cell, tiny_cell, variants, words_for
from tests.fault_classes import rings
from tests.installed import INSTALLED
from tests.together import chosen, seen_inside

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
    """The cells that the chosen tests look into, by their words."""
    return {
        " ".join(words): tiny_cell("cluster.world_size=4", *words)
        for words in chosen(request, "inside", "words")
    }


@pytest.fixture(scope="module")
def inside(launcher, tmp_path_factory, cells):
    """By cell and rank, what attention was given and collectives carried in one step."""
    return seen_inside(launcher, tmp_path_factory.mktemp("cells"), cells)


@pytest.mark.parametrize("words", CASES_AND_FLAGS)
def test_attention_exchanges_the_bytes_of_its_formula(cells, inside, words):
    cell, ranks = cells[" ".join(words)], inside[" ".join(words)]
    sent, facts = [rank["sent_bytes"].get("attention", 0) for rank in ranks], STRATEGIES[cell.strategy]
    assert sent == [facts.rank_exchange_bytes(cell, rank % cell.sp_degree) for rank in range(len(ranks))]
    assert max(sent) == facts.exchange_bytes(cell)
    assert (sent[0] > 0) == (cell.sp_degree > 1)
    given = [cell.shard_len, cell.model.num_heads, cell.model.num_kv_heads]
    assert [rank["shapes"] for rank in ranks] == [[given]] * cell.cluster.world_size


@pytest.mark.parametrize(
    ("rotation", "kinds"), [("allgather", {"all_gather", "all_to_all"}), ("alltoall", {"all_to_all"})]
)
def test_the_record_shows_which_rotation_ran(launcher, tmp_path, rotation, kinds):
    cell = tiny_cell(
        "strategy=torch_cp", f"strategy.rotation={rotation}", "engine=ddp", "cluster.world_size=2"
    )
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert record.config["strategy.rotation"] == rotation
    seen = record.sections["engagement"].calls
    assert {call.split()[1] for call in seen if call.startswith("attention")} == kinds
    counted, computed = counted_and_computed(record)
    assert counted == computed


PURPOSES = {"ddp": {"gradients"}, "fsdp2": {"gradients", "parameters"}, "zero3": {"parameters"}}


@pytest.mark.parametrize("words", [pytest.param((f"engine={engine}",), id=engine) for engine in PURPOSES])
def test_the_engines_own_traffic_is_not_booked_as_attention(cells, inside, words):
    cell, sent = cells[" ".join(words)], inside[" ".join(words)][0]["sent_bytes"]
    assert PURPOSES[cell.engine] <= {purpose for purpose, size in sent.items() if size}
    assert sent["attention"] == STRATEGIES[cell.strategy].exchange_bytes(cell)


@pytest.mark.slow  # every gate of test_traffic counts these bytes too
def test_in_bf16_zero3_halves_the_bytes_of_gradients_and_the_other_engines_do_not(launcher, tmp_path):
    cells = {
        f"{engine} {dtype}": tiny_cell(f"engine={engine}", f"dtype={dtype}", "cluster.world_size=2")
        for engine in PURPOSES
        for dtype in ("fp32", "bf16")
    }
    inside = seen_inside(launcher, tmp_path, cells)
    sent = {name: ranks[0]["sent_bytes"]["gradients"] for name, ranks in inside.items()}
    less = {engine: sent[f"{engine} fp32"] / sent[f"{engine} bf16"] for engine in PURPOSES}
    assert less == {"ddp": 1, "fsdp2": 1, "zero3": 2}


PAIR = ("cluster.world_size=2",)
PACKED = (*PAIR, "strategy=ring", "data.packing=documents")
ALONE = ("workload=attention", "cluster.world_size=4")
"""What attention gets wrong needs no model around it: its parity is checked first in any cell."""
MUTATIONS = {
    faults.forget_to_shard_rank_1: ((*PAIR, "strategy=ulysses"), "other tokens"),
    faults.contiguous_positions_with_zigzag: ((*PAIR, "strategy=ring"), "other tokens"),
    faults.average_losses_over_ranks: ((*PAIR, "strategy=ring"), "objective on engine=ddp: the gradient of"),
    faults.divide_by_sp_degree: ((*PAIR, "strategy=ulysses"), "gradients are exactly 1/sp_degree = 0.5"),
    faults.shift_labels_after_sharding: ((*PAIR, "strategy=ulysses"), "other tokens"),
    faults.attend_locally: ((*ALONE, "strategy=ulysses"), "every rank attends to its own shard only"),
    faults.drop_a_ring_step: ((*ALONE, "strategy=ring"), "ring step 3 is dropped"),
    faults.see_one_token_too_far: (
        (*ALONE, "strategy=ulysses", "kernel=math"),
        "each token sees its successor",
    ),
    faults.skip_the_lse_rescale: ((*ALONE, "strategy=ring"), "added without rescaling by their LSE"),
    faults.tile_the_kv_heads: ((*ALONE, "strategy=ring"), "tiled over the query heads"),
    faults.sum_gradients_over_the_ranks: ((*ALONE, "strategy=ulysses"), "dq is off .* exactly sp_degree = 4"),
    faults.reuse_the_first_block_in_backward: ((*ALONE, "strategy=ring"), "dq is off"),
    faults.forget_documents: (PACKED, "attention crosses the boundaries of documents"),
    faults.let_positions_go_on: ((*PACKED, "data=synthetic"), "other tokens"),
    faults.label_the_last_token_of_documents: (PACKED, "other tokens|objective on engine=ddp"),
    faults.fill_a_permuted_buffer: ((*ALONE, "strategy=ulysses"), "is off"),
}


@pytest.mark.parametrize("fault", MUTATIONS, ids=lambda fault: fault.__name__)
def test_a_strategy_that_does_not_do_what_was_asked_is_a_wrong_result(launcher, tmp_path, fault):
    words, reason = MUTATIONS[fault]
    cell = tiny_cell(*words, "engine=ddp", "model=qwen3_nano", "model.num_heads=8")
    cell = replace(cell, model=replace(cell.model, num_kv_heads=4))
    record, _ = run_cell(launcher, cell, tmp_path, fault)
    assert record.status == "wrong_result", record.reason
    assert re.search(reason, record.reason)
    assert record.sections["timing"] is None


DISTFLASH, RSA = ("strategy=distflash_attn",), ("strategy=ring_self_attention", *ALONE)
MUTATIONS_OF_RINGS = {
    rings.forget_what_helpers_found: (DISTFLASH, "out is off"),
    rings.drop_the_last_round: (DISTFLASH, "ring step 2 is dropped"),
    rings.help_with_ones_own_queries: (DISTFLASH, "out is off"),
    rings.keep_the_gradients_of_lent_keys: (DISTFLASH, "dk is off"),
    rings.give_back_without_gradients_of_queries: (DISTFLASH, "dq is off"),
    rings.compute_kept_outputs_again: (
        (*DISTFLASH, ONLY_CHECKPOINTED, "checkpointing=true"),
        "rank 0: attention exchanged .* has to exchange",
    ),
    faults.skip_the_lse_rescale: (DISTFLASH, "added without rescaling by their LSE"),
    faults.drop_a_ring_step: (RSA, "ring step 3 is dropped"),
    rings.use_ones_own_values_all_the_way: (RSA, "out is off"),
    rings.see_later_keys_of_a_block: (RSA, "out is off"),
    rings.leave_gradients_a_rank_from_home: (RSA, "dk is off"),
    rings.forget_the_sum_of_a_row: (RSA, "dq is off"),
}
QUICK = (rings.compute_kept_outputs_again, rings.leave_gradients_a_rank_from_home)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if fault in QUICK else pytest.mark.slow) for fault in MUTATIONS_OF_RINGS],
    ids=lambda fault: fault.__name__,
)
def test_a_mistake_in_what_ranks_lend_or_keep_is_a_wrong_result(launcher, tmp_path, fault):
    words, reason = MUTATIONS_OF_RINGS[fault]
    record, _ = run_cell(launcher, tiny_cell("cluster.world_size=4", "engine=ddp", *words), tmp_path, fault)
    assert record.status == "wrong_result", record.reason
    assert re.search(reason, record.reason)
    assert record.sections["timing"] is None


def test_a_strategy_that_exchanges_only_while_it_is_inspected_is_a_wrong_result(launcher, tmp_path):
    cell = tiny_cell(
        "strategy=ulysses", "engine=ddp", "cluster.world_size=2", "seq_len=2k", "measure.trace=true"
    )
    record, _ = run_cell(launcher, cell, tmp_path, faults.exchange_only_while_inspected)
    assert record.status == "wrong_result", record.reason
    # One layer: Q, K and V in one all-to-all and the output in another, forward and backward.
    assert "made 0 calls of all_to_all, the inspected step 4 (attention)" in record.reason
    assert record.sections["engagement"].calls["attention all_to_all"] == 4
    assert record.sections["timing"] is record.sections["trace"] is None
