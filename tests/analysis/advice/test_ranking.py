"""Which options come first, which differences are told, and what of that a measurement changes."""

from dataclasses import replace

import pytest

from analysis.advice.answer import answer
from analysis.advice.option import Measured
from analysis.advice.ranking import NEAR, RESOLUTION, behind, ranked
from bench.cost.band import Band
from bench.cost.fit import Fit
from bench.cost.prediction import CORNERS
from tests.analysis.advice.asked import QUESTION, asked
from tests.analysis.records import FAILED, make_record, write_sweep


def option_of(advice, strategy, sp_degree):
    options = (*advice.ranking.able, *advice.ranking.too_large)
    return next(o for o in options if (o.cell.strategy, o.cell.sp_degree) == (strategy, sp_degree))


def test_those_that_fit_come_first_by_speed_and_the_rest_is_said_apart(advice):
    first, *rates = [option.tokens_per_s.expected for option in advice.ranking.able]
    assert rates == sorted(rates, reverse=True)
    near = [each for each in advice.ranking.able if each.tokens_per_s.expected > (1 - NEAR) * max(rates)]
    assert first < max(rates)  # as fast as the fastest, with least memory
    assert advice.ranking.first is min(near, key=lambda each: each.prediction.needed_bytes.expected)
    assert {option.cell.strategy for option in advice.ranking.too_large} == {"local", "ring_self_attention"}
    fits = advice.ranking.able[-1]
    undecided = replace(advice.ranking.first, prediction=with_need(advice.ranking.first, 60, 90))
    assert undecided.fit is Fit.UNDECIDED
    assert ranked([undecided, fits]).first is fits


def with_need(option, low_gib, high_gib):
    need = Band(low_gib * 2**30, (low_gib + high_gib) / 2 * 2**30, high_gib * 2**30)
    return replace(option.prediction, needed_bytes=need)


def test_strategies_are_compared_at_equal_rates(advice):
    """Their own bands overlap by far; at equal rates one is slower at every corner."""
    first, slow = option_of(advice, "ring", 2), option_of(advice, "ring_flash_attn_llama3", 2)
    assert slow.tokens_per_s.high > first.tokens_per_s.low
    found = behind(first, slow)
    assert found.is_told
    assert found.low <= found.high < -RESOLUTION
    assert len(slow.corners) == len(CORNERS)


def test_a_difference_at_one_corner_only_is_not_told(advice):
    """What the exchange takes hangs on the link: slow links would tell these two apart, fast ones not."""
    first = option_of(advice, "ulysses", 2)
    bare = replace(first, corners=tuple(replace(parts, transfer_ms=0.0) for parts in first.corners))
    slow_links = [corner.links == "high" for corner in CORNERS]
    slower = [
        replace(parts, transfer_ms=parts.step_ms / 5 if is_slow else 0.0)
        for parts, is_slow in zip(bare.corners, slow_links, strict=True)
    ]
    found = behind(bare, replace(bare, corners=tuple(slower)))
    assert (found.is_told, found.high) == (False, 0.0)
    assert found.low < -RESOLUTION


def test_the_answer_names_all_that_are_level_and_how_far_the_next_is_behind(advice):
    which, fits, speed, why, sure = answer(advice.ranking)
    assert which.startswith("No clear difference between ")
    assert "ring, " in which.partition(";")[0]
    first = advice.ranking.first
    comes_first = f"; {first.cell.strategy} sp 8 comes first: of those within 1 % of the fastest"
    assert f"{comes_first} it needs least memory." in which
    assert "distflash_attn sp 8 is" in which
    assert f"{first.prediction.needed_bytes.high / 2**30:.1f} of 79.1 GiB" in fits
    assert f"{first.tokens_per_s.expected * 8:,.0f} tokens/s" in speed
    assert "attention 77 %" in why
    assert "nothing ran" in sure


RAN = Measured(
    tokens_per_s=(9000.0, 9100.0),
    started_at=("2026-01-01T00:00:00", "2026-01-01T00:10:00"),
    peak_allocated_bytes=30 * 2**30,
    transfer=0.05,
    ran_out=False,
)


def test_between_measurements_the_rule_for_processes_decides_and_beside_predictions_nothing_is_told(advice):
    """Two processes a side are too few, six in turns are enough."""
    first, other = option_of(advice, "ulysses", 8), option_of(advice, "ring_flash_attn_llama3", 8)
    assert behind(first, other).is_told
    assert not behind(replace(first, measured=RAN), other).is_told
    one, other = option_of(advice, "ulysses", 8), option_of(advice, "ring", 8)
    starts = [f"2026-01-01T00:{minute:02}:00" for minute in range(12)]
    fast = replace(RAN, tokens_per_s=(200.0,) * 6, started_at=tuple(starts[::2]))
    slow = replace(RAN, tokens_per_s=(100.0,) * 6, started_at=tuple(starts[1::2]))
    assert behind(replace(one, measured=fast), replace(other, measured=slow)).is_told
    shorter = {"tokens_per_s": (200.0, 201.0), "started_at": tuple(starts[:2])}
    fast = replace(fast, **shorter)
    assert not behind(replace(one, measured=fast), replace(other, measured=slow)).is_told


NO_CHOICE_ONCE = ("offload.", "tiled_mlp", "optimizer", "padding", "mistake", "data.packing")


@pytest.fixture
def sweep(advice, tmp_path):
    """Two processes of one option, of which records of another length do not count, and one without room."""
    ulysses = option_of(advice, "ulysses", 8).cell.flat() | {"mode": "measure", "seed": 3, "measure.steps": 4}
    older = {key: value for key, value in ulysses.items() if not key.startswith(NO_CHOICE_ONCE)}
    ring = option_of(advice, "ring", 2).cell.flat() | {"mode": "measure"}
    records = [
        record_of(ulysses, 11000.0),
        record_of(older, 11200.0) | {"repeat": 1},
        record_of(ulysses | {"seq_len": 2**16}, 1.0),
        record_of(ulysses, 1.0) | {"repeat": 2, "provenance": "replayed"},
        make_record(config=ring) | FAILED | {"status": "out_of_memory", "reason": "no room"},
    ]
    return write_sweep(tmp_path, records)


def record_of(config, step_ms):
    record = make_record(config=config)
    record["timing"] |= {"step_times_ms": [[step_ms] * 8] * 8, "tokens_per_step": config["seq_len"]}
    return record


def test_measured_records_of_the_same_work_overrule_the_model(sweep):
    advice = asked(*QUESTION, records=[sweep])
    ran = [option for option in advice.ranking.able if option.measured]
    assert [(option.cell.strategy, option.cell.sp_degree) for option in ran] == [("ulysses", 8)]
    assert sorted(ran[0].measured.tokens_per_s) == [pytest.approx(2**17 / 11.2), pytest.approx(2**17 / 11)]
    assert option_of(advice, "ring", 2).fit is Fit.OUT_OF_MEMORY
    told = "\n".join(advice.lines(whole=False))
    assert [line.split()[:2] for line in told.splitlines() if ") measured " in line] == [["ulysses", "8"]]
    assert "Measured: ulysses sp 8, 11,809 tokens/s in 2 processes; predicted were" in told
    assert "Measured: ring sp 2 ran out of memory" in told
    assert "Between what is measured and what is predicted no difference is told." in told
