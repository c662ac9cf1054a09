"""A replay runs one rank of a cell, which allocates and sends the same as that rank in a real cell."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from msgspec import structs

from bench.cost.band import Band
from bench.measure.facts import RankReport
from bench.plan.planned import PlannedCell
from bench.ranks import replay_group
from bench.record.record import Provenance
from bench.run.cell.outcome import first_rank_flaw, outcome
from bench.run.cell.run import run
from bench.run.node.worker import run_cell as all_passes
from bench.strategies import STRATEGIES
from tests.benchmarks.replay_memory import ENGINES, NOISE_BYTES, compare, words_of
from tests.support.cells import INSTALLED, NEED_ALL_RANKS, make_cell

SHORT = (
    "mode=replay", "cluster.world_size=4", "seq_len=512", "measure.steps=1", "measure.warmup_steps=0",
    "measure.repeats=1",
)  # fmt: skip
STRATEGIES_OF_CI = ("ulysses", "ring", "deepspeed_ulysses")


def replay(launcher, folder, *words, entry=None):
    planned = PlannedCell(make_cell(*SHORT, *words), repeat=0, order=0)
    return run(planned, launcher, folder, entry=entry)


def compared(launcher, folder, strategy, ranks, engine):
    """Compare the first and the last rank with their replays, whose peaks must be equal."""
    comparisons = compare(launcher, folder, words_of(strategy, ranks, engine), (0, ranks - 1))
    for rank, found in comparisons.items():
        assert not isinstance(found, str), (rank, found)
        assert abs(found.difference) <= NOISE_BYTES, (rank, found)
        assert abs(found.replayed.whole_life - found.real[0].whole_life) <= NOISE_BYTES, (rank, found)
    return comparisons


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES_OF_CI)
def test_replay_peaks_and_bytes_equal_those_of_the_real_rank(launcher, tmp_path, strategy, engine):
    for found in compared(launcher, tmp_path, strategy, 4, engine).values():
        assert found.replayed.sent_bytes == found.real[0].sent_bytes
        assert found.replayed.calls == found.real[0].calls


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", [name for name in INSTALLED if STRATEGIES[name].shares_sequences])
def test_replay_peaks_equal_those_of_the_real_rank_everywhere(launcher, tmp_path, strategy, engine, ranks):
    assert compared(launcher, tmp_path, strategy, ranks, engine)


def test_replay_record_names_its_rank_and_claims_no_value(launcher, tmp_path):
    record = replay(launcher, tmp_path, "strategy=ring", "layout=contiguous")
    assert (record.status, record.provenance) == ("ok", Provenance.REPLAYED)
    assert record.config["replay.rank"] == 3  # the last one has most to do
    assert [*map(len, record.timing.step_times_ms)] == [1]
    assert all(record.sections[name] is None for name in NEED_ALL_RANKS if name in record.sections)
    not_made = {check.what for check in record.checks if check.reason}
    assert {"attention", "losses and gradient norms", "attention at full length"} <= not_made
    moved = Counter()
    for message in record.engagement.messages:
        moved[message.communication.kind] += message.sent_bytes * (message.purpose == "attention")
    assert moved["send"] == moved["recv"] == record.engagement.sent_bytes["attention"][0] > 0
    assert record.analytic.link_ms is None  # no file says what joins these cores


@pytest.mark.parametrize("rank", [0, 3])
def test_replay_gate_expects_the_bytes_of_the_rank_that_ran(launcher, tmp_path, rank):
    words = ("strategy=distflash_attn", "checkpointing=true", f"replay.rank={rank}")
    cell = make_cell(*SHORT, *words)
    facts = STRATEGIES["distflash_attn"]
    assert facts.rank_communication_bytes(cell, 0) != facts.rank_communication_bytes(cell, 3)
    record = replay(launcher, tmp_path, *words)
    assert record.status == "ok", record.reason


def test_replay_of_attention_has_times_and_no_errors(launcher, tmp_path):
    record = replay(launcher, tmp_path, "strategy=ring", "workload=attention", "replay.rank=2")
    assert record.status == "ok", record.reason
    calls = record.attention
    assert calls.error_ulps == {}
    assert calls.one_device_forward_ms  # measured by the rank that ran


def test_replay_reports_the_stages_of_the_rank_that_runs(launcher, tmp_path):
    """The hang watch and the progress line need them."""
    stages = []
    listener = SimpleNamespace(on_stage=stages.append, on_tick=lambda: None)
    cell = make_cell(*SHORT, "strategy=ring", "replay.rank=3")
    launcher.run(cell, tmp_path, listener=listener, skipped_passes=frozenset(NEED_ALL_RANKS))
    assert {"timing", "engagement"} <= {stage.pass_name for stage in stages}


def test_outcome_of_a_replay_is_a_range(launcher, tmp_path):
    record = replay(launcher, tmp_path, "strategy=ring", "workload=attention")
    assert outcome(record).startswith("at most ")
    link_ms = {"attention": Band(1.0, 2.0, 512e3)}
    with_link = structs.replace(record, analytic=structs.replace(record.analytic, link_ms=link_ms))
    assert outcome(with_link).startswith("1 to ")  # 512 tokens in 512 s


def hand_out_nan(job, log):
    replay_group._fill = lambda out, own: out.fill_(math.nan)
    return all_passes(job, log)


@pytest.mark.parametrize("words", [("strategy=ulysses",), ("strategy=ring", "workload=attention")])
def test_replay_names_the_rank_whose_number_is_not_finite(launcher, tmp_path, words):
    record = replay(launcher, tmp_path, *words, "replay.rank=3", entry=hand_out_nan)
    assert record.status == "wrong_result"
    assert "rank 3" in record.reason or record.reason.startswith("attention: out of a timed call")


def test_flaw_of_a_rank_names_the_rank_of_the_replay():
    report = RankReport({}, {}, flaw="timing.window_ms is nan")
    assert first_rank_flaw([report], range(3, 4)).startswith("rank 3: timing.window_ms is nan")


def test_replay_of_16_ranks_needs_one_process(launcher, tmp_path):
    ranks = 16
    heads = ("model=qwen3_nano", "model.num_heads=8", "model.num_kv_heads=8")
    words = ("strategy=usp", "ulysses_degree=8", *heads)
    record = replay(
        launcher, tmp_path, *words, f"cluster.world_size={ranks}", "seq_len=4k", f"replay.rank={ranks - 1}"
    )
    assert record.status == "ok", record.reason
