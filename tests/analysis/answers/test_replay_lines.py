"""Replayed cells in a report: ranges, decisions, sentences and figures."""

import pandas as pd
import pytest

from analysis.answers.provenance import NO_LINK_RATES, REPLAY_NOTE, replay_lines
from analysis.answers.verdict import verdict
from analysis.cells.cells import REPLAYED_BANNER
from analysis.cells.selection import select_for_figures
from analysis.cells.statuses import REPLAY_UNDECIDED, shown_statuses
from analysis.read.views import View
from analysis.show.figures.figures import FIGURES, draw_figure
from bench.common.labels import GIB
from tests.support.records import CPU, make_record, make_timing
from tests.support.sections import rows_of

BUSY = {"low": 1.0, "expected": 2.0, "high": 5.0}


def replayed(strategy, processes_ms, link_ms=BUSY, repeats=6, **overrides):
    """Return records of one rank of two, one for each step time, with `link_ms` on the link."""
    config = {"strategy": strategy, "mode": "replay", "replay.rank": 0} | overrides.pop("config", {})
    sections = {
        "provenance": "replayed", "losses": None, "parity": None, "trace": None, "checks": [],
        "analytic": {"link_ms": None if link_ms is None else {"attention": link_ms}},
    }  # fmt: skip
    times_ms = processes_ms * (repeats // len(processes_ms))
    return [
        make_record(config=config, repeat=n, **sections | {"timing": make_timing([[ms] * 8])} | overrides)
        for n, ms in enumerate(times_ms)
    ]


def test_replayed_rate_ranges_from_all_to_none_of_the_link(cells_of):
    (row,) = rows_of(cells_of(replayed("ring", [100.0], repeats=1)), View.PAGE)
    assert row["tokens/s"] == "78,019 to 81,920"  # 8,192 tokens in 105 ms, and in 100 ms
    assert not {"speed-up", "attention communication: transfer"} & {*row}


def test_replayed_rate_is_an_upper_bound_without_link_speed(cells_of):
    cells = cells_of(replayed("ring", [100.0], None, repeats=1, config=CPU))
    (row,) = rows_of(cells, View.SUMMARY)
    assert row["tokens/s"] == "at most 81,920"
    assert NO_LINK_RATES in replay_lines(cells)


def test_replay_separates_strategies_whose_ranges_are_disjoint(cells_of):
    disjoint = verdict(cells_of([*replayed("ulysses", [100.0]), *replayed("ring", [120.0])]))
    assert disjoint.answer.startswith("ulysses has the most tokens/s in a replay at 8k")
    (line,) = disjoint.details
    assert line.startswith(
        "8k, replayed: ulysses, 78,019 to 81,920 tokens/s, 1.20 times ring (1.14 to 1.25 by"
    )
    overlapping = verdict(cells_of([*replayed("ulysses", [100.0]), *replayed("ring", [104.0])]))
    assert overlapping.answer.startswith("A replay does not separate ring and ulysses at 8k")


def test_replay_counts_no_interval(cells_of):
    times = {"timing": make_timing([[100.0] * 8])}
    alone = verdict(cells_of(replayed("ring", [100.0], repeats=1)))
    both = verdict(cells_of([*replayed("ring", [100.0], repeats=1), make_record(**times)]))
    assert "8 timed steps" in alone.certainty
    assert "interval" not in alone.certainty
    assert "1 of 1 cell has six or more timed steps" in both.certainty


def test_replayed_range_spans_all_processes(cells_of):
    """The slowest process of one side and the fastest of the other may be what a real run is like."""
    found = verdict(cells_of([*replayed("ulysses", [100.0, 116.0]), *replayed("ring", [120.0, 121.0])]))
    assert found.answer.startswith("A replay does not separate")


def test_slowest_replayed_rank_counts_for_the_cell(cells_of):
    ranks = [replayed("ring", [ms], config={"replay.rank": rank}) for rank, ms in ((0, 50.0), (1, 150.0))]
    found = verdict(cells_of([*replayed("ulysses", [100.0]), *(record for rank in ranks for record in rank)]))
    assert found.details[0].startswith("8k, replayed: ulysses")
    assert "times ring (rank 1)" in found.details[0]
    assert "ring (rank 0)" not in found.details[0]


def test_replay_is_undecided_with_few_processes_or_unknown_link(cells_of):
    few = verdict(cells_of([*replayed("ulysses", [100.0], repeats=1), *replayed("ring", [300.0], repeats=1)]))
    assert few.answer == "Comparisons of replays are undecided at 8k (one process each)."
    unknown = verdict(cells_of([*replayed("ulysses", [100.0], None), *replayed("ring", [300.0], None)]))
    assert "undecided at 8k (the time on the link is not known)" in unknown.answer


def test_replay_has_no_speed_up_no_scaling_and_no_mfu(cells_of):
    records = [
        *replayed("local", [400.0], {"low": 0.0, "expected": 0.0, "high": 0.0}, repeats=1),
        *replayed("ring", [100.0], repeats=1),
        *replayed("ring", [60.0], repeats=1, config={"cluster.world_size": 4, "sp_degree": 4}),
    ]
    frame = cells_of(records).frame
    columns = ["speed_up", "scaling_speed_up", "scaling_efficiency", "mfu_causal", "hfu_causal"]
    assert frame[columns].isna().all().all()
    assert frame["tokens_per_s_per_rank"].tolist() == pytest.approx(
        (frame["tokens_per_s"] / frame["cluster.world_size"]).tolist()
    )


def test_replay_lines_have_the_note_and_the_check_command(cells_of):
    replays = [*replayed("ring", [100.0]), *replayed("ulysses", [100.0])]
    note, command = replay_lines(cells_of(replays))
    assert note == REPLAY_NOTE
    assert command.endswith(
        "-m seq_len=1k model.num_layers=1 strategy=ring,ulysses cluster.world_size=2 cluster.ranks_per_gpu=2"
        " model=qwen3_nano layout=contiguous kernel=torch_flash dtype=bf16 engine=zero3"
    )


def test_no_replay_lines_without_replays(cells_of):
    assert replay_lines(cells_of([make_record()])) == []


@pytest.mark.parametrize(("used", "status"), [(70, "ok"), (78, REPLAY_UNDECIDED)])
def test_replay_with_less_than_3_gib_free_is_undecided(cells_of, used, status):
    gpu = {"device_name": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": [80 * GIB], "packages": {}}
    memory = {"peak_allocated_bytes": [60 * GIB], "device_used_bytes": [used * GIB]}
    cells = cells_of(replayed("ring", [100.0], repeats=1, environment=gpu, memory=memory))
    assert shown_statuses(cells.frame).tolist() == [status]
    found = verdict(cells)
    undecided = [
        line for line in replay_lines(cells) if "ring at 8k: less than 3.0 GiB was left free" in line
    ]
    assert len(undecided) == (status == REPLAY_UNDECIDED)
    longest = "Longest length that fits in a replay, without NCCL's memory: ring: none (8k undecided)."
    assert (longest in found.fits) == (status == REPLAY_UNDECIDED)


def test_figures_of_replays_show_the_range_and_a_banner(cells_of):
    cells = cells_of([*replayed("ring", [100.0], repeats=1), make_record(config={"strategy": "ring"})])
    sheet = draw_figure("throughput", select_for_figures(cells))
    texts = " ".join(spot.text for spot in sheet.hover_areas)
    assert "with all and none of the link's time exposed 78,019 to 81,920" in texts
    fills = {line.get_fillstyle() for line in sheet.axes.get_lines() if line.get_marker() == "^"}
    assert fills == {"none", "full"}
    assert cells.banner == REPLAYED_BANNER
    reading = FIGURES["throughput"].caption_for(cells)
    assert "95 % interval" in reading
    assert "exposed, which is modelled" in reading
    assert pd.isna(cells.frame["mfu_causal"]).any()
