"""Every class of fault is a wrong result, whose reason names the first departure.

No gate knows any of these faults. Those in ALONE are found by what one cell does; those in HELD only by what
`local` did with the same data, which a sweep without `local` runs of its own accord.
"""

import re
from inspect import isfunction, signature

import pytest

from bench.node.worker import run_cell as run_cell_of_ranks
from tests.cells import make_cell, run_cell
from tests.fault_classes import engine, late, long, not_finite, small, unwatched

WORDS = (
    "strategy=ulysses", "seq_len=512", "engine=ddp", "measure.steps=4", "measure.warmup_steps=1",
    "measure.budget_s=100", "measure.trace=false", "measure.repeats=1", "cluster.world_size=2",
)  # fmt: skip
LONG = ("seq_len=2k",)
ROWS = "attention at 2,048 tokens: out of the sampled rows is off"
KEYS = "attention at 2,048 tokens: dk of the sampled keys is off"
ATTENTION = "rank 0, parity: attention parity: "


def gradient(name, engine_name="ddp"):
    return f"objective on engine={engine_name}: the gradient of .*{name}.weight is off"


ALONE = {
    long.keep_own_keys_instead_of_received_ones: (("strategy=ring", *LONG), ROWS),
    long.see_the_last_1024_tokens_only: (LONG, ROWS),
    long.lose_the_gradient_of_the_keys: (LONG, "attention at 2,048 tokens: dk and dq disagree"),
    long.enlarge_the_gradient_of_the_keys_by_a_tenth: (LONG, KEYS),
    long.lose_a_hop_of_the_keys_of_one_head: (("strategy=ring", *LONG), KEYS),
    engine.keep_the_last_micro_step_only: (("engine=zero3", "grad_accum=2"), gradient("", "zero3")),
    engine.ignore_the_loss_of_rank_1: (("engine=fsdp2",), gradient("", "fsdp2")),
    engine.sum_gradients_instead_of_averaging: (("engine=fsdp2",), gradient("", "fsdp2")),
    engine.enlarge_gradients_a_little: (("engine=fsdp2",), "fsdp2: the scale of the gradient of .* is"),
    engine.lose_the_gradient_of_a_matrix: (("engine=zero3",), gradient("mlp.down_proj", "zero3")),
    engine.freeze_a_matrix: (("engine=fsdp2",), "the gradient of .*mlp.down_proj.weight is missing or not"),
    engine.never_reduce: ((), gradient("")),
    engine.recompute_with_other_positions: (
        ("strategy=ring", "checkpointing=true"),
        gradient("[qk]_(norm|proj)"),
    ),
    engine.recompute_with_dropout: (("checkpointing=true",), gradient("mlp.down_proj")),
    late.fetch_the_others_data_later: (
        ("strategy=local", "dp_shard=2"), "step 2: the ranks saw other tokens",
    ),
    late.repeat_a_step_later: ((), "step 2: the ranks saw other tokens"),
    late.skip_the_update_of_rank_1: (("engine=zero3",), "updates: an optimizer step left .* on rank 1$"),
    late.skip_one_parameter: (("engine=fsdp2",), "gradient norm that the optimizer was given is off"),
    late.stop_learning_later: ((), "updates: an optimizer step left .* on ranks 0, 1"),
    late.drift_apart: ((), "updates: replicas of .* differ on ranks 0, 1"),
    late.stop_reducing_later: ((), "updates: replicas of .* differ on ranks 0, 1"),
    late.clip_by_the_ranks_own_norm: (("engine=fsdp2",), "gradient norm that the step reports is off"),
    late.never_clip: ((), "gradient norm that the optimizer was given is off"),
    late.clip_every_parameter_alone: ((), "gradient norm that the optimizer was given is off"),
    small.scale_scores_one_percent_too_high: (("strategy=ring",), ATTENTION + "out is off"),
    small.enlarge_one_head_by_two_percent: ((), ATTENTION + "out is off"),
    small.exchange_in_8_bits: ((), ATTENTION + "out is off"),
    small.miss_the_last_hop_in_a_few_rows: (("strategy=ring",), ATTENTION + "out is off .* at 8 of 512"),
    small.enlarge_query_gradients_by_two_percent: ((), ATTENTION + "dq is off"),
    small.drop_one_output_in_a_hundred: ((), ATTENTION + "out is off"),
    not_finite.overflow_a_gradient_of_rank_1: (("engine=fsdp2",), "the gradient of .* missing or not finite"),
    not_finite.overflow_a_gradient_later: ((), "losses: the gradient norm of step 3 is (inf|nan)"),
    not_finite.overflow_the_loss_of_rank_1_in_step_1: ((), "losses: the loss of step 1 on rank 1 is inf"),
    not_finite.lose_a_parameter_in_the_last_step: ((), "updates: numbers of .* are not finite on rank 1$"),
    not_finite.lose_a_parameter_everywhere: ((), "updates: numbers of .* are not finite on ranks 0, 1"),
    not_finite.lose_a_second_moment_of_rank_1: (
        ("engine=zero3",), "updates: numbers of exp_avg_sq of .*weight are not finite on rank 1$",
    ),
    not_finite.lose_the_momentum_everywhere: (
        ("engine=fsdp2", "optimizer=sgd"),
        "updates: numbers of momentum_buffer of .*weight are not finite on ranks 0, 1$",
    ),
    not_finite.lose_a_parameter_after_all_steps: (
        ("engine=zero3", "measure.trace=true"), "updates: numbers of .*weight are not finite on rank 0$",
    ),
    not_finite.lose_a_parameter_of_rank_1_at_load: (
        (), "rank 1, updates: numbers of .*weight are not finite before the first step",
    ),
    not_finite.lose_a_shard_of_rank_0_at_load: (
        ("engine=fsdp2",), "rank 0, updates: numbers of .*weight are not finite before the first step",
    ),
    not_finite.lose_all_gradients_of_long_sequences: (
        ("engine=zero3", "seq_len=1k"), "losses: the loss of step 0 on rank 0 is (inf|nan)",
    ),
    unwatched.be_right_before_the_first_step_only: ((), "attention at 512 tokens: out of the sampled rows"),
    unwatched.be_right_in_the_first_step_only: ((), "attention at 512 tokens: out of the sampled rows"),
    unwatched.attend_locally_in_timed_calls: (
        ("workload=attention",), "attention: out of a timed call at 512 tokens is off by .* ulps",
    ),
}  # fmt: skip
HELD = {
    long.cut_the_loss_of_rank_1: (LONG, "step 0: the loss"),
    long.feed_other_tokens_than_noted: (("strategy=ring", *LONG), "step 0: the loss"),
    long.stop_counting_positions: (("dtype=fp32", *LONG), "step 0: the loss"),
    late.learn_twice_as_fast_later: ((), "step 3: the loss"),
    late.undo_one_update: ((), "step 3: the loss"),
    late.forget_the_optimizers_state: ((), "step 0: the loss"),
    unwatched.be_right_while_looked_at_only: (("measure.trace=true",), "step 0: the loss"),
    unwatched.exchange_while_looked_at_only: (("measure.trace=true",), "step 0: the loss"),
}
FAST = {
    engine.keep_the_last_micro_step_only,
    engine.enlarge_gradients_a_little,
    engine.freeze_a_matrix,
    late.skip_the_update_of_rank_1,
    late.drift_apart,
    late.clip_by_the_ranks_own_norm,
    late.never_clip,
    not_finite.lose_a_parameter_everywhere,
    not_finite.lose_a_second_moment_of_rank_1,
    not_finite.lose_the_momentum_everywhere,
    not_finite.lose_a_parameter_after_all_steps,
    not_finite.lose_a_parameter_of_rank_1_at_load,
    not_finite.lose_all_gradients_of_long_sequences,
    unwatched.attend_locally_in_timed_calls,
}
"""One for each line of a gate that no other test guards."""


def cases(table):
    return [
        pytest.param(fault, id=fault.__name__, marks=() if fault in FAST else pytest.mark.slow)
        for fault in table
    ]


def passes_before(said):
    """Those that take longest and do not find what is said."""
    if said.startswith(ATTENTION):
        return ()
    return ("parity", "objective") if said.startswith(("updates", "losses", "rank")) else ("parity",)


@pytest.mark.parametrize("fault", cases(ALONE))
def test_a_fault_is_found_in_the_cell_itself(launcher, tmp_path, fault):
    words, said = ALONE[fault]
    record, _ = run_cell(launcher, make_cell(*WORDS, *words), tmp_path, fault, without=passes_before(said))
    assert record.status == "wrong_result", record.reason
    assert re.search(said, record.reason)
    assert record.sections["timing"] is None


@pytest.mark.parametrize("fault", cases(HELD))
def test_a_fault_that_leaves_one_cell_plausible_departs_from_local(launcher, tmp_path, held, fault):
    words, said = HELD[fault]
    cell = make_cell(*WORDS, *words)
    alone, _ = run_cell(launcher, cell, tmp_path, fault)
    assert (alone.status, alone.reason) == ("ok", None)
    record = held(cell, alone)
    assert record.status == "wrong_result"
    assert record.reason.startswith(said)
    assert record.reason.endswith("of local on the same data")
    assert record.sections["timing"] is None


@pytest.mark.parametrize("module", [long, engine, late, small, not_finite, unwatched])
def test_a_class_has_three_faults_at_least_and_each_is_in_a_table(module):
    faults = {
        each
        for each in vars(module).values()
        if isfunction(each) and [*signature(each).parameters] == ["job", "log"]
    }
    faults -= {run_cell_of_ranks}
    assert len(faults) >= 3
    assert faults <= {*ALONE, *HELD}
