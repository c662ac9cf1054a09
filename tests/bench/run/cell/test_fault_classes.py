"""Every class of fault makes a wrong result, whose reason names the first difference.

No gate knows these faults. A cell alone shows the faults in FAST_ALONE and SLOW_ALONE. Only a comparison with
`local` on the same data shows the faults in FAST_COMPARED and SLOW_COMPARED.
"""

import re
from dataclasses import replace
from functools import partial
from inspect import isfunction, signature

import pytest

from tests.support.cells import make_cell, run_cell
from tests.support.faults.classes import (
    attention,
    engine,
    late,
    long,
    not_finite,
    rings,
    rope,
    small,
    tokens,
    unwatched,
)
from tests.support.faults.classes.tampering import no_fault, run_with_fault
from tests.support.records import as_line, as_record

WORDS = (
    "strategy=ulysses", "seq_len=512", "engine=ddp", "measure.steps=4", "measure.warmup_steps=1",
    "measure.budget_s=100", "measure.trace=false", "measure.repeats=1", "cluster.world_size=2",
)  # fmt: skip
LONG = ("seq_len=2k",)
RING = ("strategy=ring",)
PACKED = (*RING, "data.packing=documents")
CALL = ("workload=attention",)
TWO_LAYERS = (*LONG, "model=qwen3_nano", "model.num_layers=2")
FOUR = (*CALL, "cluster.world_size=4")
"""Attention alone, without a model: parity is checked first in any cell."""
FOUR_RING = (*FOUR, *RING)
DISTFLASH = ("strategy=distflash_attn", "cluster.world_size=4")
SELF_ATTENTION = (*FOUR, "strategy=ring_self_attention")
ATTENTION = "rank 0, parity: attention parity: .*"
LONG_ROWS, LONG_KEYS, LONG_SUMS = (
    f"attention at 2,048 tokens: {problem}"
    for problem in (
        "out of the sampled rows is off",
        "dk of the sampled keys is off",
        "d[kv] and [a-z]+ disagree",
    )
)
OFF_AT_LENGTH = "step 0: the gradient of model.model.layers.0.mlp.down_proj.weight is off by"
SECOND_LAYER = "positions: rank 0 rotates position .*layers.1.self_attn does not rotate by"
CLIP = "gradient norm that the optimizer was given is off"


def gradient(name, engine_name="ddp"):
    return f"objective on engine={engine_name}: the gradient of .*{name}.weight is off"


def not_all_finite(what, where):
    return f"updates: numbers of {what}.*are not finite on {where}$"


FAST_ALONE = [
    (attention.attend_locally, FOUR, ATTENTION + "every rank attends to its own shard only"),
    (attention.drop_a_ring_step, FOUR_RING, ATTENTION + "ring step 3 is dropped"),
    (
        attention.see_one_token_too_far, (*FOUR, "kernel=math"), ATTENTION + "each token sees its successor",
    ),
    (attention.skip_the_lse_rescale, FOUR_RING, ATTENTION + "added without rescaling by their LSE"),
    (attention.tile_the_kv_heads, FOUR_RING, ATTENTION + "tiled over the query heads"),
    (attention.sum_gradients_over_the_ranks, FOUR, ATTENTION + "dq is off .* exactly sp_degree = 4"),
    (no_fault, (*FOUR_RING, "mistake=own_block_in_ring_backward"), ATTENTION + "dq is off"),
    (attention.fill_a_permuted_buffer, FOUR, ATTENTION + "is off"),
    (attention.forget_documents, PACKED, "attention crosses the boundaries of documents"),
    (rings.compute_kept_outputs_again,
     (*DISTFLASH, "strategy.checkpoints=attention_output", "checkpointing=true"),
     "rank 0: attention sent .* has to send"),
    (rings.leave_gradients_a_rank_from_home, SELF_ATTENTION, ATTENTION + "dk is off"),
    (tokens.forget_to_shard_rank_1, (), "other tokens"),
    (tokens.contiguous_positions_with_zigzag, RING, "other tokens"),
    (no_fault, ("mistake=labels_shifted_in_shards",), "other tokens"),
    (tokens.let_positions_go_on, (*PACKED, "data=synthetic"), "other tokens"),
    (tokens.label_the_last_token_of_documents, PACKED, "objective on engine=ddp"),
    (tokens.feed_other_tokens_than_were_fetched, (), "other tokens"),
    (tokens.divide_by_sp_degree, (), "objective on .* gradients are exactly 1/sp_degree = 0.5"),
    (tokens.average_losses_over_ranks, RING, gradient("")),
    (long.scale_the_scores, (*RING, *LONG), LONG_ROWS),
    (long.forget_the_mask, LONG, LONG_ROWS),
    (long.enlarge_the_gradient_of_the_keys, (*RING, *LONG), LONG_SUMS),
    (long.enlarge_the_gradient_of_the_values, LONG, LONG_SUMS),
    (long.enlarge_the_gradient_of_the_keys, (*CALL, *LONG), LONG_SUMS),
    (rope.rotate_the_second_layer_one_off, (*TWO_LAYERS, "engine=fsdp2"), SECOND_LAYER),
    (rope.rotate_one_off_on_rank_1, LONG, "positions: rank 1 rotates position 1024 .*layers.0.self_attn"),
    (rope.rotate_one_off_while_recomputing, (*LONG, "engine=zero3", "checkpointing=true"),
     "positions: rank 0 .*self_attn in backward does not rotate by"),
    (engine.keep_the_last_micro_step_only, ("engine=zero3", "grad_accum=2"), gradient("", "zero3")),
    (engine.enlarge_gradients_a_little, ("engine=fsdp2",), "objective on .* scale of the whole gradient is"),
    (engine.enlarge_the_gradients_of_an_mlp, (), "objective on .* scale of the gradient of .* is"),
    (engine.freeze_a_matrix, ("engine=fsdp2",), "objective on .* of .*down_proj.weight is missing or not"),
    (late.repeat_a_step_later, (), "step 2: the ranks saw other tokens"),
    (late.skip_the_update_of_rank_1, ("engine=zero3",), "updates: an optimizer step left .* on rank 1$"),
    (late.drift_apart, (), "updates: replicas of .* differ on ranks 0, 1"),
    (late.clip_by_the_ranks_own_norm, ("engine=fsdp2",), "gradient norm that the step reports is off"),
    (late.never_clip, (), CLIP),
    (not_finite.lose_what_follows_the_512th_token, ("seq_len=1k",),
     "objective on engine=ddp: the losses of 1,024 tokens are not finite on rank 1"),
    (not_finite.overflow_a_gradient_later, (), "losses: the gradient norm of step 3 is (inf|nan)"),
    (not_finite.overflow_the_loss_of_rank_1_in_step_1, (), "losses: the loss of step 1 on rank 1 is inf"),
    (not_finite.lose_one_token_between_the_sampled_ones, (*CALL, *LONG),
     "attention: out of a timed call at 2,048 tokens is not finite everywhere"),
    (not_finite.lose_a_row_of_the_value_gradient_under_the_clock, (*CALL, *LONG),
     "attention: dv of a timed call at 2,048 tokens is not finite everywhere"),
    (not_finite.lose_a_row_of_the_value_gradient_while_inspected, (*CALL, *LONG),
     "attention at 2,048 tokens: dv is not finite"),
    (not_finite.lose_a_parameter_everywhere, (), not_all_finite("", "ranks 0, 1")),
    (not_finite.lose_a_second_moment_of_rank_1, ("engine=zero3",), not_all_finite("exp_avg_sq", "rank 1")),
    (not_finite.lose_the_momentum_everywhere, ("engine=fsdp2", "optimizer=sgd"),
     not_all_finite("momentum_buffer", "ranks 0, 1")),
    (not_finite.lose_a_parameter_after_all_steps, ("engine=zero3", "measure.trace=true"),
     not_all_finite("", "rank 0")),
    (not_finite.lose_a_parameter_of_rank_1_at_load, (),
     "rank 1, updates: numbers of .*weight are not finite before the first step"),
    (not_finite.lose_all_gradients_of_long_sequences, ("engine=zero3", *LONG),
     "losses: the loss of step 0 on rank 0 is (inf|nan)"),
    (unwatched.attend_locally_in_timed_calls, CALL, "attention: out of a timed call at 512 tokens is off by"),
    (unwatched.exchange_only_while_inspected, (*LONG, "measure.trace=true"),
     r"made 0 calls of all_to_all, the inspected step 4 \(attention\)"),
]  # fmt: skip
"""Faults that run by default: one for each line of a gate that no other test guards."""
SLOW_ALONE = [
    (rope.rotate_the_second_layer_one_off, (*RING, *TWO_LAYERS), SECOND_LAYER),
    (rope.rotate_the_second_layer_by_interpolated_positions, (*TWO_LAYERS, "engine=zero3"), SECOND_LAYER),
    (rings.drop_the_last_round, DISTFLASH, ATTENTION + "ring step 2 is dropped"),
    (rings.keep_the_gradients_of_lent_keys, DISTFLASH, ATTENTION + "dk is off"),
    (attention.skip_the_lse_rescale, DISTFLASH, ATTENTION + "added without rescaling by their LSE"),
    (attention.drop_a_ring_step, SELF_ATTENTION, ATTENTION + "ring step 3 is dropped"),
    (rings.forget_the_sum_of_a_row, SELF_ATTENTION, ATTENTION + "dq is off"),
    (long.enlarge_the_gradient_of_the_keys_by_a_tenth, LONG, LONG_KEYS),
    (long.lose_a_hop_of_the_keys_of_one_head, (*RING, *LONG), LONG_KEYS),
    (engine.lose_the_gradient_of_a_matrix, ("engine=zero3",), gradient("mlp.down_proj", "zero3")),
    (engine.never_reduce, (), gradient("")),
    (engine.recompute_with_dropout, ("checkpointing=true",), gradient("mlp.down_proj")),
    (small.scale_scores_one_percent_too_high, RING, ATTENTION + "out is off"),
    (small.enlarge_one_head_by_two_percent, (), ATTENTION + "out is off"),
    (small.exchange_in_8_bits, (), ATTENTION + "out is off"),
    (small.miss_the_last_hop_in_a_few_rows, RING, ATTENTION + "out is off .* at 8 of 512"),
    (small.enlarge_query_gradients_by_two_percent, (), ATTENTION + "dq is off"),
    (small.enlarge_query_gradients_by_two_percent, ("model.num_heads=8",), ATTENTION + "dq is off"),
    (small.drop_one_output_in_a_hundred, (), ATTENTION + "out is off"),
    (not_finite.overflow_a_gradient_of_rank_1, ("engine=fsdp2",),
     "objective on .* gradient of .* missing or not finite"),
    (unwatched.be_right_before_the_first_step_only, (), "attention at 512 tokens: out of the sampled rows"),
    (unwatched.be_right_in_the_first_step_only, (), "attention at 512 tokens: out of the sampled rows"),
]  # fmt: skip
FAST_COMPARED = [
    (unwatched.exchange_while_looked_at_only, ("measure.trace=true",), "step 0: the loss"),
    (long.train_a_matrix_on_the_tokens_of_rank_0, LONG, OFF_AT_LENGTH),
    (long.train_a_matrix_on_the_tokens_of_rank_0, (*LONG, "engine=fsdp2"), OFF_AT_LENGTH),
    (long.train_a_matrix_on_the_tokens_of_rank_0, (*RING, *LONG, "engine=zero3"), OFF_AT_LENGTH),
]
SLOW_COMPARED = [
    (long.cut_the_loss_of_rank_1, LONG, "step 0: the loss"),
    (long.feed_other_tokens_than_noted, (*RING, *LONG), "step 0: the loss"),
    (late.learn_twice_as_fast_later, (), "step 3: the loss"),
    (late.undo_one_update, (), "step 3: the loss"),
    (unwatched.be_right_while_looked_at_only, ("measure.trace=true",), "step 0: the loss"),
]


def cell_of(words):
    """Return the cell of these words, of which `mistake=` sets its injected fault."""
    faults = {word.partition("=")[2] for word in words if word.startswith("mistake=")}
    cell = make_cell(*WORDS, *(word for word in words if not word.startswith("mistake=")))
    return replace(cell, inject_fault=faults.pop()) if faults else cell


def cases(fast, slow):
    return [
        pytest.param(*case, id=f"{case[0].__name__} {' '.join(case[1])}", marks=marks)
        for table, marks in ((fast, ()), (slow, pytest.mark.slow))
        for case in table
    ]


def passes_before(reason):
    """Return slow passes that do not find the fault with this reason."""
    if reason.startswith((ATTENTION, "attention crosses")):
        return ()
    return (
        ("parity",)
        if reason.startswith(("objective", "gradient norm", "rank 0: "))
        else ("parity", "objective")
    )


@pytest.mark.parametrize(("fault", "words", "reason"), cases(FAST_ALONE, SLOW_ALONE))
def test_a_cell_with_a_fault_is_a_wrong_result(launcher, tmp_path, fault, words, reason):
    entry, cell = partial(run_with_fault, fault), cell_of(words)
    record, _ = run_cell(launcher, cell, tmp_path, entry, without=passes_before(reason))
    assert record.status == "wrong_result", record.reason
    assert re.search(reason, record.reason)
    assert (record.timing, record.trace, record.fixed_cost_s) == (None, None, None)
    assert (record.checks is None) == (record.failure is not None)
    assert as_record(as_line(record)).reason == record.reason


@pytest.mark.parametrize(("fault", "words", "reason"), cases(FAST_COMPARED, SLOW_COMPARED))
def test_a_fault_that_no_gate_finds_departs_from_local(
    launcher, tmp_path, compared_with_local, fault, words, reason
):
    cell = make_cell(*WORDS, *words)
    alone, _ = run_cell(launcher, cell, tmp_path, partial(run_with_fault, fault))
    assert (alone.status, alone.reason) == ("ok", None)
    record = compared_with_local(cell, alone)
    assert record.status == "wrong_result"
    assert record.reason.startswith(reason)
    assert record.reason.endswith("of local on the same data")
    assert (record.timing, record.fixed_cost_s) == (None, None)


@pytest.mark.parametrize(
    "module", [attention, tokens, rope, rings, long, engine, late, small, not_finite, unwatched]
)
def test_each_fault_class_has_three_faults_all_in_a_table(module):
    functions = filter(isfunction, vars(module).values())
    faults = {function for function in functions if [*signature(function).parameters] == ["job"]}
    assert len(faults) >= 3
    assert faults <= {fault for fault, *_ in (*FAST_ALONE, *SLOW_ALONE, *FAST_COMPARED, *SLOW_COMPARED)}
