"""Table of the faults that a cell, or its comparison with `local`, has to find."""

from dataclasses import replace

from bench.measure.mistakes import MISTAKES
from tests.support.cells import make_cell
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
    window,
)
from tests.support.faults.classes.tampering import no_fault

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
    (long.exchange_the_ends_of_shards, LONG, LONG_ROWS),
    (rope.rotate_the_second_layer_one_off, (*TWO_LAYERS, "engine=fsdp2"), SECOND_LAYER),
    (rope.rotate_one_off_on_rank_1, LONG, "positions: rank 1 rotates position 1024 .*layers.0.self_attn"),
    (rope.rotate_one_off_while_recomputing, (*LONG, "engine=zero3", "checkpointing=true"),
     "positions: rank 0 .*self_attn in backward does not rotate by"),
    (window.queue_steps_until_inspected, LONG, "timing: faster than the device"),
    (window.queue_calls_until_inspected, (*CALL, *LONG), "timing: faster than the device"),
    (window.return_the_last_result, (*CALL, *LONG), "attention: out of a timed call at 2,048 .* is off by"),
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
     "timed step 0 has 0 calls of all_to_all .*, and the inspected step has"),
    (unwatched.exchange_while_looked_at_only, (), "timed step 0 has 0 calls of all_to_all .*"),
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
    (window.attend_locally_from_the_second_step, LONG, "after 4 steps: the mean gradient"),
    (long.lose_a_quarter_of_the_embedding_gradient, LONG, "step 0: the gradient"),
    (long.train_a_matrix_on_the_tokens_of_rank_0, LONG, OFF_AT_LENGTH),
    (long.train_a_matrix_on_the_tokens_of_rank_0, (*LONG, "engine=fsdp2"), OFF_AT_LENGTH),
    (long.train_a_matrix_on_the_tokens_of_rank_0, (*RING, *LONG, "engine=zero3"), OFF_AT_LENGTH),
]
SLOW_COMPARED = [
    (
        window.attend_locally_from_the_second_step,
        (*LONG, "engine=fsdp2"),
        "after 4 steps: the mean gradient",
    ),
    (
        window.attend_locally_from_the_second_step,
        (*LONG, "engine=zero3"),
        "after 4 steps: the mean gradient",
    ),
    (long.cut_the_loss_of_rank_1, LONG, "step 0: the loss"),
    (long.feed_other_tokens_than_noted, (*RING, *LONG), "step 0: the loss"),
    (late.learn_twice_as_fast_later, (), "step 3: the loss"),
    (late.undo_one_update, (), "step 3: the loss"),
    (unwatched.be_right_while_looked_at_only, ("measure.trace=true",), "step 0: the loss"),
]


INJECTED = [
    (no_fault, (f"strategy={facts.strategy}", "data.prompt_tokens=100", f"mistake={name}"), None)
    for name, facts in MISTAKES.items()
]
"""Mistakes that `experiment=loss_equivalence` injects, in cells like its own."""
SOUND = [(no_fault, (), None), (no_fault, RING, None)]
EVERY_FAULT = (*SOUND, *INJECTED, *FAST_ALONE, *SLOW_ALONE, *FAST_COMPARED, *SLOW_COMPARED)


def cell_of(words):
    """Return the cell of these words, of which `mistake=` sets its injected fault."""
    faults = {word.partition("=")[2] for word in words if word.startswith("mistake=")}
    cell = make_cell(*WORDS, *(word for word in words if not word.startswith("mistake=")))
    return replace(cell, inject_fault=faults.pop()) if faults else cell
