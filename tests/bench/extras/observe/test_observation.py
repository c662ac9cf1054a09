"""Somebody's own training loop, observed on real ranks: its record, its gates, its report."""

import json
import os
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
from bench.config import OWN, ConfigError
from bench.cost.memory import memory_need
from bench.extras.observe.observation import LOST_PEER_WAIT_S
from bench.extras.observe.observed_record import UNKNOWN, checks_of_loop, need_of_loop
from bench.extras.observe.tokens import RankTokens, layout_of, misfed
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
    "same_tokens": "were fed the same 256 tokens: give each its shard",
    "same_positions": "all were given the same positions",
    "no_positions": "without position_ids each counts its positions from 0",
    "a_position_twice": "position 511 is missing or held twice",
    "labels_shifted_in_shards": "labels were shifted after sharding",
    "no_group": "bytes between ranks in a step, but no ranks were said to share a sequence",
    "gradients_of_ones_own": "differ on ranks 0, 1: they began as different weights, or gradients were not",
    "own_means": "a token of rank 0 weighs 1.497 times one of rank 1",
    "labels_cut_off": "the last token of each shard is not trained on, such as position 255 of rank 0",
    "doubled": "gradients are 2 times those of the mean loss over all ranks' valid tokens (256 as counted)",
    "positions_counted_inside": "rank 1 rotates position 256 by other angles than one device",
    "rope_by_length": "rank 0 rotates position 1 by other angles than one device",
    "inf_on_rank_1": "the loop says that the loss of step 1 on rank 1 is inf",
}

LOOPS = ("right", "told", "prompt_alone", "added_up", "loss_of_all_ranks", "ignored_window", *MISTAKES)
"""Variants of the loop that end well, the others after them."""


JUDGED = {"steps": 8, "timed_steps": 1}
"""As few steps as leave a record: of a mistake no time is looked at."""


def observed_each(job, log):
    """A rank's whole life: one loop after another, each in a folder of its name, and the first again."""
    join(job)
    for name in (*LOOPS, LOOPS[0]):
        own_loop.train(job.folder / name, name, **(JUDGED if name in MISTAKES else {}))
    return {}


def raise_in_a_step(job, log):
    join(job)
    own_loop.train(job.folder, "raises")


def observe_on_ranks(launcher, folder, entry):
    """The ends of the ranks, and the record of their loop where there is one."""
    ends = launcher.run(make_cell("strategy=ring", "cluster.world_size=2"), folder, entry=entry)
    for end in ends:  # what a test that fails shows: an end that no test asks for may be why
        print(end.rank, end.exit_code, end.failure, end.log_tail)
    path = folder / "records.jsonl"
    return ends, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def records(launcher, tmp_path_factory):
    """The records of each loop, by its name."""
    folder = tmp_path_factory.mktemp("observed")
    ends, _ = observe_on_ranks(launcher, folder, observed_each)
    assert all(end.report for end in ends), ends[0].log_tail
    return {name: read_lines(folder / name / "records.jsonl") for name in LOOPS}


@pytest.fixture
def record(records):
    return records["right"][0]


def test_a_loop_that_is_right_leaves_the_sections_of_a_cell_and_what_it_did_is_seen_from_outside(record):
    assert (record["status"], record["reason"], record["role"]) == ("ok", None, "observed")
    for section in ("parity", "engagement", "timing", "memory", "telemetry", "trace"):
        assert record[section] is not None, section
    steps = record["timing"]["step_times_ms"]
    assert [len(rank) for rank in steps] == [6, 6]
    assert sum(steps[0]) <= record["timing"]["window_ms"][0]
    seen = {
        "strategy": "gathered_keys", "seq_len": 512, "batch": 1, "sp_degree": 2, "layout": "contiguous",
        "engine": "ddp", "dtype": "fp32",
    }  # fmt: skip
    assert seen.items() <= record["config"].items()
    assert record["engagement"]["attention_shapes"] == [[[256, 4, 2]]] * 2
    assert {*record["parity"]["errors"]} == {"out", "dq", "dk", "dv"}
    assert record["trace"]["purposes_unknown"] == [None, None]
    assert all(record["trace"]["compute_ms"]["optimizer"][rank] > 0 for rank in (0, 1))
    # Per layer: K and V to the other rank forward; backward half of both whole gradients.
    shard_bytes = 2 * 256 * 8 * 4
    assert record["engagement"]["sent_bytes"]["attention"] == [2 * (2 * shard_bytes + 2 * shard_bytes)] * 2


def test_the_record_says_what_of_a_loop_was_compared_and_what_never_is(record):
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
        **UNKNOWN,
        "objective": (
            "the loop did not give its loss; call loss(loss, valid_tokens) of the context in every step"
        ),
        "shapes in attention": "no formula of strategy gathered_keys is known",
        "bytes that attention exchanges": "no formula of strategy gathered_keys is known",
    }


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("told", None),  # a third of one rank's labels does not count
        ("prompt_alone", None),  # none of them does
        ("added_up", "divided by 2: right where gradients are added up over 2 ranks"),
    ],
)
def test_a_loop_that_gives_its_loss_has_its_objective_compared_if_it_is_known_who_divides(
    records, loop, said
):
    (record,) = records[loop]
    assert (record["status"], record["reason"]) == ("ok", None)
    (objective,) = (check for check in record["checks"] if check["what"] == "objective")
    if said is None:
        assert (objective["reason"], objective["tokens"], objective["steps"]) == (None, 512, 1)
    else:
        assert said in objective["reason"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loop_that_does_not_train_the_whole_sequence_is_a_wrong_result(records, mistake):
    (record,) = records[mistake]
    assert record["status"] == "wrong_result"
    assert MISTAKES[mistake] in record["reason"]
    assert record["timing"] is None


def test_layers_that_are_not_plain_causal_are_named_where_ranks_share_a_sequence(records):
    """The second of two has a window, which the loop's attention ignores, as accelerate did (4177)."""
    (record,) = records["ignored_window"]
    assert (record["status"], record["timing"]) == ("unsupported", None)
    for named in ("1 of 2 layers are sliding_attention (sliding_window=64)", "called with a sliding window"):
        assert named in record["reason"]


def test_a_step_that_raises_leaves_one_record_of_it_and_the_error_goes_on(launcher, tmp_path):
    ends, records = observe_on_ranks(launcher, tmp_path, raise_in_a_step)
    assert {end.failure.message for end in ends if end.failure} == {"a step that raises"}
    (record,) = records
    assert record["status"] == "error"
    assert record["reason"].endswith("a step that raises")
    assert (record["config"]["seq_len"], record["config"]["layout"]) == (512, "contiguous")


def test_the_same_loop_again_is_a_repeat(records):
    assert [record["repeat"] for record in records["right"]] == [0, 1]
    assert len({record["cell_id"] for record in records["right"]}) == 1


def test_a_loss_that_is_gathered_from_all_ranks_is_traced_like_any_other(records):
    """Its backward scatters, as that of DeepSpeed's tutorial does."""
    (record,) = records["loss_of_all_ranks"]
    assert record["status"] == "ok", record["reason"]
    assert record["engagement"]["calls"]["other scatter"] > 0
    assert record["trace"]["purposes_unknown"] == [None, None]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_loop_of_deepspeeds_under_torchrun_is_reported(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(REPOSITORY / "tests" / "scripts" / "deepspeed_loop.py"), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "records.jsonl").read_text())
    assert (record["status"], record["config"]["engine"]) == ("ok", "zero3")
    exchanged = record["analytic"]["attention_bytes"]
    assert record["engagement"]["sent_bytes"]["attention"] == [exchanged, exchanged]
    assert "deepspeed_ulysses" in (tmp_path / "report.html").read_text()
    assert "tokens/s" in done.stdout


def rank_tokens(place, positions, digest, **more):
    return RankTokens(
        group=[0, 1], place=place, batch=1, length=len(positions), micro_steps=1, digest=digest,
        positions=positions, model_shifts_labels=False, **more,
    )  # fmt: skip


def test_needed_memory_is_known_of_our_strategies_and_engines():
    cell = make_cell("strategy=ulysses")
    assert need_of_loop(cell) == memory_need(cell)
    assert need_of_loop(replace(cell, strategy="gathered_keys")) is None
    assert need_of_loop(replace(cell, engine=replace(cell.engine, name="theirs"))) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_told_from_positions_even_by_one_rank_alone(layout):
    pieces = [LAYOUTS[layout].slices(16, 2, place) for place in (0, 1)]
    ranks = [
        rank_tokens(place, [i for piece in pieces[place] for i in range(16)[piece]], str(place))
        for place in (0, 1)
    ]
    assert layout_of(ranks) == layout
    assert [layout_of([rank]) for rank in ranks] == [layout, layout]
    assert misfed(ranks) is None


def test_packed_documents_are_no_mistake():
    assert misfed([rank_tokens(0, [0, 1, 2, 3], "a"), rank_tokens(1, [4, 0, 1, 2], "b")]) is None


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([rank_tokens(0, [0, 1], "a"), rank_tokens(1, [2, 3], "b")], None),
        ([rank_tokens(0, [0, 1], "a"), rank_tokens(1, [0, 1], "b")], "positions start anew"),
        ([rank_tokens(0, [0, 1], "a")], "no ranks share a sequence"),
    ],
)
def test_tokens_count_as_compared_only_where_their_positions_were(group, reason):
    cell = replace(make_cell("strategy=ring"), trainer=OWN)
    (tokens,) = (each for each in checks_of_loop(cell, {}, [group], []) if each.what == "tokens")
    assert tokens.steps == (1 if reason is None else None)
    assert tokens.reason is None if reason is None else tokens.reason.startswith(reason)


def test_without_a_process_group_it_says_how_to_start():
    with pytest.raises(ConfigError, match="start the script with torchrun, even on one device"):
        bench.observe(nn.Linear(1, 1))


def lose_a_peer(job, log):
    """Rank 1 dies in a step without a word; rank 0, which waits for it, is told to end as by torchrun."""
    join(job)
    sleep = time.sleep

    def sleep_or_be_ended(seconds):
        return os.kill(os.getpid(), signal.SIGTERM) if seconds == LOST_PEER_WAIT_S else sleep(seconds)

    if job.rank == 1:
        own_loop.train(job.folder, steps=4)
        os._exit(3)
    time.sleep = sleep_or_be_ended
    own_loop.train(job.folder)


def test_who_loses_a_peer_and_is_told_to_end_leaves_the_record_first(launcher, tmp_path):
    ends, (record,) = observe_on_ranks(launcher, tmp_path, lose_a_peer)
    assert record["status"] == "error"
    assert any(text in record["failure"]["message"] for text in LOST_PEER_TEXTS)
    assert [end.exit_code for end in ends] == [-signal.SIGTERM, 3]
    assert LOST_PEER_WAIT_S <= GRACE_S / 2  # before the other ranks are stopped
