"""Replayed cells in a report: their brackets, what decides between two, what is said and drawn of them."""

import pandas as pd
import pytest

from analysis.answers.provenance import NO_LINK_RATES, REPLAY_NOTE, replay_lines
from analysis.answers.verdict import verdict
from analysis.cells.cells import REPLAYED_BANNER
from analysis.cells.selection import for_figures
from analysis.cells.statuses import NO_SPARE, shown_statuses
from analysis.read.views import View
from analysis.show.figures.figures import FIGURES, build
from bench.common.labels import GIB
from tests.support.records import CPU, make_record, make_timing
from tests.support.sections import rows_of

BUSY = {"low": 1.0, "expected": 2.0, "high": 5.0}


def replayed(strategy, processes_ms, link_ms=BUSY, repeats=6, **overrides):
    """A process for each of these times of a step, of one rank of two, with so much time on the link."""
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


def test_a_rate_is_a_bracket_with_all_and_with_none_of_the_link(cells_of):
    (row,) = rows_of(cells_of(replayed("ring", [100.0], repeats=1)), View.PAGE)
    assert row["tokens/s"] == "78,019 to 81,920"  # 8,192 tokens in 105 ms, and in 100 ms
    assert not {"speed-up", "attention exchange: transfer"} & {*row}


def test_without_rates_of_the_link_a_rate_is_an_upper_bound(cells_of):
    cells = cells_of(replayed("ring", [100.0], None, repeats=1, config=CPU))
    (row,) = rows_of(cells, View.SUMMARY)
    assert row["tokens/s"] == "at most 81,920"
    assert NO_LINK_RATES in replay_lines(cells)


def test_a_strategy_is_faster_only_where_no_part_of_the_link_could_turn_it_round(cells_of):
    apart = verdict(cells_of([*replayed("ulysses", [100.0]), *replayed("ring", [120.0])]))
    assert apart.answer == (
        "Most tokens/s in a replay, however much of the link's time is exposed: ulysses at 8k."
    )
    (line,) = apart.details
    assert line.startswith("8k, replayed: ulysses, 78,019 to 81,920 tokens/s, 1.20 (1.14 to 1.25 by both")
    near = verdict(cells_of([*replayed("ulysses", [100.0]), *replayed("ring", [104.0])]))
    assert near.answer.startswith("Not separated by a replay, as ranges overlap: ring and")


def test_no_interval_is_counted_of_a_replay(cells_of):
    times = {"timing": make_timing([[100.0] * 8])}
    alone = verdict(cells_of(replayed("ring", [100.0], repeats=1)))
    both = verdict(cells_of([*replayed("ring", [100.0], repeats=1), make_record(**times)]))
    assert "n=8" in alone.certainty
    assert "interval" not in alone.certainty
    assert "1 of 1 have a 95 % interval" in both.certainty


def test_a_range_spans_all_processes(cells_of):
    """As the slowest of one and the fastest of the other may be what a real run would be."""
    near = verdict(cells_of([*replayed("ulysses", [100.0, 116.0]), *replayed("ring", [120.0, 121.0])]))
    assert near.answer.startswith("Not separated by a replay, as ranges overlap")


def test_of_several_ranks_of_a_cell_the_slowest_one_counts(cells_of):
    ranks = [replayed("ring", [ms], config={"replay.rank": rank}) for rank, ms in ((0, 50.0), (1, 150.0))]
    found = verdict(cells_of([*replayed("ulysses", [100.0]), *(record for each in ranks for record in each)]))
    assert found.details[0].startswith("8k, replayed: ulysses")
    assert "times ring, rank 1" in found.details[0]
    assert "ring, rank 0" not in found.details[0]


def test_processes_are_asked_for_and_an_unknown_link_decides_nothing(cells_of):
    few = verdict(cells_of([*replayed("ulysses", [100.0], repeats=1), *replayed("ring", [300.0], repeats=1)]))
    assert few.answer == "Undecided in a replay: 8k (one process each)."
    unknown = verdict(cells_of([*replayed("ulysses", [100.0], None), *replayed("ring", [300.0], None)]))
    assert unknown.answer == "Undecided in a replay: 8k (the time on the link is not known)."


def test_a_replay_has_no_speed_up_no_scaling_and_no_utilisation(cells_of):
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


def test_what_is_measured_and_modelled_is_said_and_which_real_ranks_check_results(cells_of):
    replays = [*replayed("ring", [100.0]), *replayed("ulysses", [100.0])]
    note, command = replay_lines(cells_of(replays))
    assert note == REPLAY_NOTE
    assert command.endswith(
        "-m seq_len=1k model.num_layers=1 strategy=ring,ulysses cluster.world_size=2 cluster.ranks_per_gpu=2"
        " model=qwen3_nano layout=contiguous kernel=torch_flash dtype=bf16 engine=zero3"
    )


def test_a_report_without_replays_says_nothing_of_them(cells_of):
    assert replay_lines(cells_of([make_record()])) == []


@pytest.mark.parametrize(("used", "status"), [(70, "ok"), (78, NO_SPARE)])
def test_less_than_3_gib_to_spare_is_undecided_as_nccl_is_not_there(cells_of, used, status):
    gpu = {"device_name": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": [80 * GIB], "packages": {}}
    memory = {"peak_allocated_bytes": [60 * GIB], "device_used_bytes": [used * GIB]}
    cells = cells_of(replayed("ring", [100.0], repeats=1, environment=gpu, memory=memory))
    assert shown_statuses(cells.frame).tolist() == [status]
    found = verdict(cells)
    said = "Undecided: ring at 8k left less than 3.0 GiB free, and NCCL may need as much."
    assert (said in replay_lines(cells)) == (status == NO_SPARE)
    longest = "Longest length that fits in a replay, without NCCL's memory: ring none (8k undecided)."
    assert (longest in found.fits) == (status == NO_SPARE)


def test_figures_draw_the_bracket_and_say_in_each_that_it_is_a_replay(cells_of):
    cells = cells_of([*replayed("ring", [100.0], repeats=1), make_record(config={"strategy": "ring"})])
    sheet = build("throughput", for_figures(cells))
    texts = " ".join(spot.text for spot in sheet.spots)
    assert "with all and none of the link's time exposed 78,019 to 81,920" in texts
    fills = {line.get_fillstyle() for line in sheet.axes.get_lines() if line.get_marker() == "^"}
    assert fills == {"none", "full"}
    assert cells.banner == REPLAYED_BANNER
    reading = FIGURES["throughput"].reading_of(cells)
    assert "95 % interval" in reading
    assert "exposed, which is modelled" in reading
    assert pd.isna(cells.frame["mfu_causal"]).any()
