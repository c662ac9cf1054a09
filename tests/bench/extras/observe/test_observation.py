"""A training loop observed on two ranks: its record, its checks, its report."""

import os
import re
import signal
import time

import pytest
from torch import nn

import bench
from bench.config import ConfigError
from bench.extras.observe import step_watchdog
from bench.extras.observe.observation import LOST_PEER_WAIT_S
from bench.run.cell.rank_watch import GRACE_S
from bench.run.node.ranks import LOST_PEER_TEXTS
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.records import read_lines
from tests.support.scripts import own_loop

ATTENTION = "attention of one layer"
MISTAKES = {
    "no_gradient_to_others": "attention at 512 tokens: dk",
    "same_tokens": "were fed the same 256 tokens; give each rank its own shard",
    "same_positions": "ranks 0 and 1 both hold position 0",
    "labels_shifted_in_shards": "position 255 of rank 0: labels were shifted after sharding",
    "no_group": "attention communicates among ranks 0, 1, but bench.observe was given no sequence group",
    "gradients_of_ones_own": "differ on ranks 0, 1: they began as different weights, or gradients were not",
    "own_means": "a token of rank 0 weighs 1.497 times one of rank 1",
    "doubled": "gradients are 2 times those of the mean loss over all ranks' valid tokens (256 tokens)",
    "positions_counted_inside": "rank 1 rotates position 256 by other angles than one device",
    "packed_without_mask": "Positions restart within the sequence, so attention must stay within each run",
    "padded_forgets_a_key": "attention at 512 tokens: out of the sampled rows is off by",
}

NOT_MADE = {
    ("distilled", "objective"): "a teacher",
    ("clips_own", "objective"): "the optimizer's gradient is no multiple of the ranks' sum",
    ("sliced_inside", "objective"): "the model returned logits of 256 tokens and was given 512",
    ("sliced_inside", "tokens"): "takes its shard inside",
    ("same_tokens_in_place", "tokens"): "the same tokens at different positions",
    ("skipped", "tokens"): "positions skip numbers",
    ("left_padded", "tokens"): "positions are below 0",
    ("left_padded", ATTENTION): "positions are below 0",
    ("hidden_documents", ATTENTION): "a mask that only the loop knows",
    ("ignored_window", ATTENTION): "1 of 2 layers are sliding_attention (sliding_window=64)",
}
"""Checks that are not made in loops that may be right, and the reasons."""
COMPLETE = ("stated", "prompt_alone", "added_up", "packed", "padded")
"""Right loops in which all checks are made."""
LOOPS = dict.fromkeys(
    ("right", *COMPLETE, "loss_of_all_ranks", "no_sampler", *(name for name, _ in NOT_MADE), *MISTAKES)
)
"""Variants of the loop, each once."""
FEWEST_STEPS = {"steps": 8, "timed_steps": 1}
"""Fewest steps that leave a record; only the times of the loop `right` are looked at."""


def train_all_loops(job, log):
    """Train one loop after another, in folders named after them, and the first loop twice."""
    join(job)
    for name in (*LOOPS, "right"):
        own_loop.train(job.folder / name, name, **({} if name == "right" else FEWEST_STEPS))
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
    return ends, read_lines(path) if path.exists() else []


@pytest.fixture(scope="module")
def records(launcher, tmp_path_factory):
    """Return the records of every loop by its name."""
    folder = tmp_path_factory.mktemp("observed")
    ends, _ = observe_on_ranks(launcher, folder, train_all_loops)
    assert all(end.report for end in ends), ends[0].log_tail
    return {name: read_lines(folder / name / "records.jsonl") for name in LOOPS}


def test_record_of_a_right_loop_has_the_sections_of_a_cell(records):
    record, _ = records["right"]
    assert (record["status"], record["reason"], record["role"]) == ("ok", None, "observed")
    for section in ("full_length", "engagement", "timing", "memory", "telemetry", "trace"):
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
    assert {*record["full_length"]["errors"]} == {"out", "dq", "dk", "dv", "dk_keys", "dv_keys"}
    assert record["full_length"]["rows"] == record["full_length"]["keys"] == 512
    assert record["trace"]["purposes_unknown"] == [None, None]
    assert all(record["trace"]["compute_ms"]["optimizer"][rank] > 0 for rank in (0, 1))
    # Per layer, forward sends K and V to the other rank, and backward half of both whole gradients.
    shard_bytes = 2 * 256 * 8 * 4
    assert record["engagement"]["sent_bytes"]["attention"] == [2 * (2 * shard_bytes + 2 * shard_bytes)] * 2


def test_record_lists_the_checks_of_a_loop(records):
    made = {check["what"]: check for check in records["right"][0]["checks"]}
    assert {what: check["reason"] for what, check in made.items()} == {
        "tokens": None,
        ATTENTION: None,
        "replicas": None,
        "rotary positions": None,
        "objective": "the loop did not state its loss; call step.loss(loss, valid_tokens) in every step",
    }
    compared = (made[what] for what in ("tokens", ATTENTION, "rotary positions"))
    assert {(check["tokens"], check["steps"]) for check in compared} == {(512, 1)}


@pytest.mark.parametrize("loop", COMPLETE)
def test_all_checks_of_a_right_loop_are_made(records, loop):
    (record,) = records[loop]
    assert (record["status"], record["reason"]) == ("ok", None)
    assert {check["reason"] for check in record["checks"]} == {None}


def test_flops_of_packed_documents_are_those_of_their_area(records):
    (packed,), (whole,) = records["packed"], records["stated"]
    areas = [sum(n * (n + 1) // 2 for n in lengths) for lengths in (own_loop.DOCUMENTS, [own_loop.SEQ_LEN])]
    flops_per_pair = 12 * own_loop.NUMBERS["num_hidden_layers"] * own_loop.NUMBERS["num_attention_heads"] * 8
    flops = [record["analytic"]["model_flops_causal"] for record in (packed, whole)]
    assert flops[1] - flops[0] == flops_per_pair * (areas[1] - areas[0])


def test_tokens_that_all_ranks_hold_count_once(records):
    (record,) = records["no_sampler"]
    assert (record["status"], record["reason"]) == ("ok", None)
    assert (record["config"]["dp_shard"], record["timing"]["tokens_per_step"]) == (1, own_loop.SEQ_LEN)


@pytest.mark.parametrize(("loop", "check"), NOT_MADE)
def test_check_is_not_made_without_what_it_assumes(records, loop, check):
    (record,) = records[loop]
    assert (record["status"], record["reason"]) == ("ok", None)
    reasons = {made["what"]: made["reason"] for made in record["checks"]}
    assert NOT_MADE[loop, check] in (reasons[check] or "made")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_loop_with_a_mistake_is_a_wrong_result(records, mistake):
    (record,) = records[mistake]
    assert record["status"] == "wrong_result"
    assert MISTAKES[mistake] in record["reason"]
    assert record["timing"] is None


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
    assert "no answer from rank 1, which ended or was killed" in record["reason"]
    assert [end.exit_code for end in ends] == [-signal.SIGTERM, 3]
    assert "SIGTERM" not in (tmp_path / "rank_0.log").read_text()  # no second message
    assert LOST_PEER_WAIT_S <= GRACE_S / 2  # before the other ranks are stopped


def end_by_sigterm(job, log):
    join(job)
    own_loop.train(job.folder, steps=3)
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_leaves_a_line_and_ends_the_ranks(launcher, tmp_path):
    ends, records = observe_on_ranks(launcher, tmp_path, end_by_sigterm)
    assert ([end.exit_code for end in ends], records) == ([-signal.SIGTERM] * 2, [])
    log = (tmp_path / "rank_0.log").read_text()
    assert "bench.observe: SIGTERM: 13 steps are needed, but only 3 were observed, so no record" in log
