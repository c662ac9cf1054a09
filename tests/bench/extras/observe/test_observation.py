"""A training loop observed on two ranks: its record, its checks, its report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from torch import nn

import bench
from bench.attention.layouts import LAYOUTS
from bench.common.environment import REPOSITORY
from bench.config import USER_CODE, ConfigError
from bench.cost.memory import memory_need
from bench.extras.observe import step_watchdog
from bench.extras.observe.observation import LOST_PEER_WAIT_S
from bench.extras.observe.observed_record import NEVER_CHECKED, loop_checks, loop_need
from bench.extras.observe.tokens import ShardTokens, find_layout, sharding_mistake
from bench.run.cell.rank_watch import GRACE_S
from bench.run.node.ranks import LOST_PEER_TEXTS
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.records import read_lines
from tests.support.scripts import own_loop
from tests.support.trace_cases import TRACED

MISTAKES = {
    "no_gradient_to_others": "attention parity: dk of a real step at 512 tokens is off by",
    "no_gradient_to_any": "attention parity: dk of a real step at 512 tokens is off by 1.0e+00",
    "same_tokens": "were fed the same 256 tokens; give each rank its own shard",
    "same_positions": "all of them were given the same positions",
    "no_positions": "without position_ids every rank counts its positions from 0",
    "a_position_twice": "position 511 is missing or occurs twice",
    "labels_shifted_in_shards": "labels were shifted after sharding",
    "no_group": "bytes between ranks in a step, but bench.observe was given no sequence group",
    "gradients_of_ones_own": "differ on ranks 0, 1: they began as different weights, or gradients were not",
    "own_means": "a token of rank 0 weighs 1.497 times one of rank 1",
    "labels_cut_off": "the last token of each shard is not trained on, such as position 255 of rank 0",
    "doubled": "gradients are 2 times those of the mean loss over all ranks' valid tokens (256 tokens)",
    "positions_counted_inside": "rank 1 rotates position 256 by other angles than one device",
    "rope_by_length": "rank 0 rotates position 1 by other angles than one device",
    "packed_without_mask": "Positions restart within the sequence, so attention must stay within each run",
    "padded_forgets_a_key": "attention parity: out of a real step at 512 tokens is off by",
    "sliced_alike_inside": "were fed the same 256 tokens; give each rank its own shard",
    "packed_labels_rolled": "rank 0 trains position 255 on token",
    "packed_labels_cut_off": "the last token of each shard is not trained on, such as position 255 of rank 0",
    "added_up_doubled": "gradients are 2 times those of the mean loss over all ranks' valid tokens",
    "inf_on_rank_1": "the stated loss of step 1 on rank 1 is inf",
    "gathered_not_summed": "the layers get 0.5 times their gradient; sum it over the ranks",
    "gathered_not_summed_before_norm": "the layers get 0.5 times their gradient; sum it over the ranks",
}

LOOPS = (
    *("right", "stated", "prompt_alone", "added_up", "packed", "padded", "distilled", "sliced_inside"),
    *("gathered_summed", "gathered_summed_before_norm", "clips_own", "loss_of_all_ranks", "ignored_window"),
    *MISTAKES,
)
"""Variants of the loop: those without a mistake first."""

JUDGED = {"steps": 8, "timed_steps": 1}
"""The fewest steps that leave a record; times of a loop with a mistake are not used."""


def train_all_loops(job, log):
    """Train one loop after another, in folders named after them, and the first loop twice."""
    join(job)
    for name in (*LOOPS, LOOPS[0]):
        own_loop.train(job.folder / name, name, **(JUDGED if name in MISTAKES else {}))
    return {}


def raise_in_a_step(job, log):
    join(job)
    own_loop.train(job.folder, "raises")


def observe_on_ranks(launcher, folder, entry):
    """Return the ends of the ranks, and the records of their loop."""
    ends = launcher.run(make_cell("strategy=ring", "cluster.world_size=2"), folder, entry=entry)
    for end in ends:  # shown if a test fails
        print(end.rank, end.exit_code, end.failure, end.log_tail)
    path = folder / "records.jsonl"
    return ends, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def records(launcher, tmp_path_factory):
    """Return the records of every loop by its name."""
    folder = tmp_path_factory.mktemp("observed")
    ends, _ = observe_on_ranks(launcher, folder, train_all_loops)
    assert all(end.report for end in ends), ends[0].log_tail
    return {name: read_lines(folder / name / "records.jsonl") for name in LOOPS}


@pytest.fixture
def record(records):
    return records["right"][0]


def test_record_of_a_right_loop_has_the_sections_of_a_cell(record):
    assert (record["status"], record["reason"], record["role"]) == ("ok", None, "observed")
    for section in ("parity", "engagement", "timing", "memory", "telemetry", "trace"):
        assert record[section] is not None, section
    steps = record["timing"]["step_times_ms"]
    assert [len(rank) for rank in steps] == [6, 6]
    assert sum(steps[0]) <= record["timing"]["window_ms"][0]
    config = {
        "strategy": "gathered_keys", "seq_len": 512, "batch": 1, "sp_degree": 2, "layout": "contiguous",
        "engine": "ddp", "dtype": "fp32",
    }  # fmt: skip
    assert config.items() <= record["config"].items()
    assert record["engagement"]["attention_shapes"] == [[[256, 4, 2]]] * 2
    assert {*record["parity"]["errors"]} == {"out", "dq", "dk", "dv"}
    assert record["trace"]["purposes_unknown"] == [None, None]
    assert all(record["trace"]["compute_ms"]["optimizer"][rank] > 0 for rank in (0, 1))
    # Per layer, forward sends K and V to the other rank, and backward half of both whole gradients.
    shard_bytes = 2 * 256 * 8 * 4
    assert record["engagement"]["sent_bytes"]["attention"] == [2 * (2 * shard_bytes + 2 * shard_bytes)] * 2


def test_record_lists_the_checks_that_a_loop_had_and_had_not(record):
    made = {check["what"]: check for check in record["checks"]}
    compared = {what: check["steps"] for what, check in made.items() if check["reason"] is None}
    assert compared == {
        "attention": 1,
        "attention at full length": 1,
        "dk and dv of sampled keys": 1,
        "tokens": 1,
        "replicas": 1,
        "rotary positions": 1,
        "collective calls of traced steps": TRACED,
    }
    assert {made[what]["tokens"] for what in compared if what != "replicas"} == {512}
    assert {what: check["reason"] for what, check in made.items() if what not in compared} == {
        **NEVER_CHECKED,
        "objective": ("the loop did not state its loss; call step.loss(loss, valid_tokens) in every step"),
        "shapes in attention": "no formula of strategy gathered_keys is known",
        "bytes that attention exchanges": "no formula of strategy gathered_keys is known",
    }


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        ("stated", None),  # a third of one rank's labels does not count
        ("prompt_alone", None),  # none of them does
        ("added_up", None),  # gradients are summed, not averaged
        ("packed", None),
        ("padded", None),
        ("sliced_inside", None),  # the model is given whole sequences
        ("gathered_summed", None),  # every rank has logits of the whole sequence
        ("gathered_summed_before_norm", None),
        ("distilled", "the loss has several targets for each token"),
        ("clips_own", "each rank clipped its own gradients before they were combined"),
    ],
)
def test_objective_is_compared_unless_the_loss_has_other_targets(records, loop, reason):
    (record,) = records[loop]
    assert (record["status"], record["reason"]) == ("ok", None)
    (objective,) = (check for check in record["checks"] if check["what"] == "objective")
    if reason is None:
        assert (objective["reason"], objective["tokens"], objective["steps"]) == (None, 512, 1)
    else:
        assert reason in objective["reason"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_loop_with_a_mistake_is_a_wrong_result(records, mistake):
    (record,) = records[mistake]
    assert record["status"] == "wrong_result"
    assert MISTAKES[mistake] in record["reason"]
    assert record["timing"] is None


def test_unplain_layers_of_a_shared_sequence_are_unsupported(records):
    """The second layer has a window, which the loop's attention ignores, as accelerate did (4177)."""
    (record,) = records["ignored_window"]
    assert (record["status"], record["timing"]) == ("unsupported", None)
    for layers in ("1 of 2 layers are sliding_attention (sliding_window=64)", "called with a sliding window"):
        assert layers in record["reason"]


def test_step_that_raises_leaves_one_record_and_still_raises(launcher, tmp_path):
    ends, records = observe_on_ranks(launcher, tmp_path, raise_in_a_step)
    assert {end.failure.message for end in ends if end.failure} == {"a step that raises"}
    (record,) = records
    assert record["status"] == "error"
    assert re.search(
        r"RuntimeError: a step that raises \(in interrupt \(own_loop.py:\d+\)\)$", record["reason"]
    )
    assert (record["config"]["seq_len"], record["config"]["layout"]) == (512, "contiguous")


def hang_in_a_step(job, log):
    join(job)
    step_watchdog.collective_timeout_s = lambda: own_loop.HANG_S / 2
    own_loop.train(job.folder, "hangs")
    return {}


def test_step_that_hangs_leaves_a_record_with_rank_and_place(launcher, tmp_path):
    _, records = observe_on_ranks(launcher, tmp_path, hang_in_a_step)
    hang, finished = records  # the sleeping rank wakes up again
    assert (hang["status"], hang["failure"]["rank"], finished["status"]) == ("timed_out", 1, "ok")
    assert re.search(r"rank 1 is in interrupt \(own_loop.py:\d+\), while rank 0 waits in ", hang["reason"])
    for rank in (0, 1):
        assert f"rank {rank}:\n" in hang["failure"]["log_tail"]


def test_record_of_the_same_loop_is_a_repeat(records):
    assert [record["repeat"] for record in records["right"]] == [0, 1]
    assert len({record["cell_id"] for record in records["right"]}) == 1


def test_loss_gathered_from_all_ranks_is_traced(records):
    """The backward scatters, as in DeepSpeed's tutorial."""
    (record,) = records["loss_of_all_ranks"]
    assert record["status"] == "ok", record["reason"]
    assert record["engagement"]["calls"]["other scatter"] > 0
    assert record["trace"]["purposes_unknown"] == [None, None]


@pytest.mark.slow
@pytest.mark.ranks
def test_deepspeed_loop_under_torchrun_is_reported(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(REPOSITORY / "tests" / "support" / "scripts" / "deepspeed_loop.py"), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "records.jsonl").read_text())
    assert (record["status"], record["config"]["engine"]) == ("ok", "zero3")
    predicted = record["analytic"]["attention_bytes"]
    assert record["engagement"]["sent_bytes"]["attention"] == [predicted, predicted]
    assert "deepspeed_ulysses" in (tmp_path / "report.html").read_text()
    assert "tokens/s" in done.stdout


def shard_tokens(group_rank, positions, digest, **more):
    return ShardTokens(
        group=[0, 1], group_rank=group_rank, batch=1, length=len(positions), micro_steps=1, digest=digest,
        positions=[positions], has_positions=True, model_shifts_labels=False, **more,
    )  # fmt: skip


def test_loop_need_is_known_for_built_in_strategies_and_engines():
    cell = make_cell("strategy=ulysses")
    assert loop_need(cell) == memory_need(cell)
    assert loop_need(replace(cell, strategy="gathered_keys")) is None
    assert loop_need(replace(cell, engine=replace(cell.engine, name="theirs"))) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_find_layout_needs_the_positions_of_one_shard_only(layout):
    pieces = [LAYOUTS[layout].slices(16, 2, rank) for rank in (0, 1)]
    shards = [
        shard_tokens(rank, [i for piece in pieces[rank] for i in range(16)[piece]], str(rank))
        for rank in (0, 1)
    ]
    assert find_layout(shards) == layout
    assert [find_layout([shard]) for shard in shards] == [layout, layout]
    assert sharding_mistake(shards) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([[0, 1], [0, 1]], [[2, 3], [2, 4]]), "position 3 is missing or occurs twice"),
        (([[0, 1], [0, 2]], [[2, 3], [1, 3]]), "sequences of a batch are split in different ways"),
    ],
)
def test_positions_of_every_sequence_of_a_batch_are_checked(rows, message):
    shards = [
        replace(shard_tokens(rank, [0, 1], str(rank)), batch=2, positions=positions)
        for rank, positions in enumerate(rows)
    ]
    assert message in sharding_mistake(shards)


def test_wrong_tokens_accepts_packed_documents():
    assert sharding_mistake([shard_tokens(0, [0, 1, 2, 3], "a"), shard_tokens(1, [4, 0, 1, 2], "b")]) is None


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([shard_tokens(0, [0, 1], "a"), shard_tokens(1, [2, 3], "b")], None),
        ([shard_tokens(0, [0, 1], "a"), shard_tokens(1, [0, 1], "b")], None),  # two documents
        ([shard_tokens(0, [0, 4], "a"), shard_tokens(1, [9, 2], "b")], "the positions do not determine"),
        ([shard_tokens(0, [0, 1], "a")], "no ranks share a sequence"),
    ],
)
def test_tokens_check_has_steps_only_if_positions_were_compared(group, reason):
    cell = replace(make_cell("strategy=ring"), trainer=USER_CODE)
    (tokens,) = (check for check in loop_checks(cell, {}, [group], []) if check.what == "tokens")
    assert tokens.steps == (1 if reason is None else None)
    assert tokens.reason is None if reason is None else tokens.reason.startswith(reason)


def test_observe_without_a_process_group_says_how_to_start():
    with pytest.raises(ConfigError, match="start the script with torchrun, even on one device"):
        bench.observe(nn.Linear(1, 1))


def lose_a_peer(job, log):
    """Rank 1 dies after some steps; rank 0, which waits for it, gets SIGTERM, as from torchrun."""
    join(job)
    sleep = time.sleep

    def sleep_or_get_sigterm(seconds):
        return os.kill(os.getpid(), signal.SIGTERM) if seconds == LOST_PEER_WAIT_S else sleep(seconds)

    if job.rank == 1:
        own_loop.train(job.folder, steps=4)
        os._exit(3)
    time.sleep = sleep_or_get_sigterm
    own_loop.train(job.folder)


def test_rank_that_lost_a_peer_stores_a_record_before_sigterm(launcher, tmp_path):
    ends, (record,) = observe_on_ranks(launcher, tmp_path, lose_a_peer)
    assert record["status"] == "error"
    assert any(text in record["failure"]["message"] for text in LOST_PEER_TEXTS)
    assert [end.exit_code for end in ends] == [-signal.SIGTERM, 3]
    assert LOST_PEER_WAIT_S <= GRACE_S / 2  # before the other ranks are stopped
