import pytest

from analysis.answers.leaders import leaders
from analysis.answers.verdict import MAX_SERIES_NAMED, verdict
from analysis.cells.cells import CPU_CAVEAT, SHARED_GPU_CAVEAT
from tests.analysis.records import CPU, SHARED_GPU, make_failure, make_record, make_timing, on_ranks


def timed(strategy, steps_ms, **config):
    return make_record(config={"strategy": strategy} | config, timing=make_timing([steps_ms] * 2))


def test_the_fastest_strategy_of_a_length_is_named(cells_of):
    found = verdict(cells_of([timed("ulysses", [100.0] * 8), timed("ring", [200.0] * 8)]))
    assert found.answer == "Most tokens/s: ulysses at 8k."
    assert "2.00 times ring" in found.details[0]


def test_overlapping_intervals_are_no_clear_difference(cells_of):
    records = [timed("ulysses", [90.0, *[100.0] * 7]), timed("ring", [95.0, *[101.0] * 7])]
    assert "Not clearly ahead: ulysses at 8k" in verdict(cells_of(records)).answer


def test_without_an_interval_nothing_is_clear(cells_of):
    records = [timed("ulysses", [100.0] * 5), timed("ring", [900.0] * 5)]
    summary = cells_of(records)
    assert not leaders(summary)[0].is_clear


def test_different_work_is_not_compared(cells_of):
    records = [timed("ulysses", [100.0] * 8), timed("ring", [200.0] * 8, engine="fsdp2")]
    assert "no strategy is ahead" in verdict(cells_of(records)).answer


def test_provenances_are_not_compared(cells_of):
    predicted = timed("ring", [200.0] * 8) | {"provenance": "predicted"}
    assert "no strategy is ahead" in verdict(cells_of([timed("ulysses", [100.0] * 8), predicted])).answer


def test_what_ran_out_of_memory_comes_first_among_the_failures(cells_of):
    records = [
        make_failure("crashed", "no", config={"strategy": "ring"}),
        make_failure("out_of_memory", "no", config={"seq_len": 65536}),
    ]
    assert verdict(cells_of(records)).failures[0] == "Out of memory: ulysses at 64k."


def test_the_longest_length_that_fits_is_told_per_strategy_where_memory_ran_out(cells_of):
    records = [
        *(timed("ulysses", [100.0] * 8, seq_len=length) for length in (8192, 16384)),
        make_failure("out_of_memory", "no", config={"seq_len": 65536}),
        make_failure("out_of_memory", "no", config={"seq_len": 32768}),
        timed("ring", [100.0] * 8, seq_len=65536),
        make_failure("out_of_memory", "no", config={"strategy": "usp"}),
    ]
    (sentence,) = verdict(cells_of(records)).fits
    assert sentence == (
        "Longest length that fits in memory: ulysses 16k (32k runs out); usp none (8k runs out);"
        " ring 64k (nothing longer was tried)."
    )


def test_of_too_many_settings_the_first_are_named_and_the_rest_counted(cells_of):
    records = [
        make_failure("out_of_memory", "no", config={"batch": 1 + i}) for i in range(MAX_SERIES_NAMED + 5)
    ]
    (sentence,) = verdict(cells_of(records)).fits
    assert sentence.count("runs out") == MAX_SERIES_NAMED
    assert sentence.endswith("; and 5 more settings; all cells are in summary.csv.")


def test_nothing_is_said_of_lengths_that_fit_where_nothing_ran_out(cells_of):
    assert verdict(cells_of([make_record(), make_failure("crashed", "no")])).fits == []


def test_two_limits_are_two_answers(cells_of):
    records = [
        make_failure("out_of_memory", "no", config={"cluster.memory_limit_gib": 1.0}),
        make_record(config={"cluster.memory_limit_gib": 2.0}),
    ]
    sentence = verdict(cells_of(records)).fits[0]
    assert "ulysses, limit 1 GiB none (8k runs out)" in sentence
    assert "ulysses, limit 2 GiB 8k (nothing longer was tried)" in sentence


def test_a_cpu_result_carries_its_caveat_and_a_gpu_result_none(cells_of):
    assert verdict(cells_of([make_record(config=CPU)])).caveat == CPU_CAVEAT
    assert verdict(cells_of([make_record()])).caveat is None


def test_one_cell_whose_ranks_share_a_gpu_takes_the_ranking_from_all(cells_of):
    cells = [make_record(config=SHARED_GPU), make_record(config={"strategy": "local"})]
    found = verdict(cells_of(cells))
    assert (found.caveat, "Most tokens/s" in found.answer) == (SHARED_GPU_CAVEAT, False)


@pytest.mark.parametrize("where", [CPU, SHARED_GPU])
def test_a_result_that_ranks_nothing_says_what_ran_and_names_no_winner(cells_of, where):
    fast, slow = (timed(s, [t] * 8, **where) for s, t in (("ulysses", 1.0), ("ring", 900.0)))
    answer = verdict(cells_of([fast, slow])).answer
    assert "ring and ulysses at 8k" in answer or "ulysses and ring at 8k" in answer
    assert "Most tokens/s" not in answer


def test_length_by_length_a_cpu_s_figures_stand_by_name_without_a_ratio(cells_of):
    fast, slow = (timed(s, [t] * 8, **CPU) for s, t in (("ulysses", 1.0), ("ring", 900.0)))
    details = verdict(cells_of([fast, slow])).details
    assert details == ["8k, in tokens/s: ring: 9,102; ulysses: 8,192,000"]


def test_a_cpu_s_figures_of_different_work_stand_in_different_lines(cells_of):
    records = [timed("ulysses", [100.0] * 8, **CPU), timed("ring", [100.0] * 8, engine="fsdp2", **CPU)]
    assert len(verdict(cells_of(records)).details) == 2


def test_settings_do_not_read_as_strategies_in_the_answer_of_a_cpu(cells_of):
    records = on_ranks(["ring"], [8192], [2, 4], **CPU)
    assert "ring (sp 2) and ring (sp 4) at 8k" in verdict(cells_of(records)).answer


def test_how_sure_says_n_and_how_many_intervals_there_are(cells_of):
    found = verdict(cells_of([timed("ulysses", [100.0] * 8), timed("ring", [200.0])]))
    assert "2 cells with n=1 to 8 steps; 1 of 2 have a 95 % interval" in found.certainty


def test_no_records_give_sentences_too(cells_of):
    assert verdict(cells_of([])).certainty == "No cell has a timed result."


@pytest.mark.parametrize("workload", ["train", "attention"])
def test_of_a_cpu_nobody_claims_more_than_checks(cells_of, workload):
    config = {"workload": workload, "cluster.device": "cpu", "hardware": "cpu"}
    answer = verdict(cells_of([make_record(config=config)])).answer
    assert answer == "Ran and passed every check: ulysses at 8k."


def test_unsteady_cells_are_counted_where_it_says_how_sure_it_is(cells_of):
    steady, unsteady = [100.0 + step for step in range(8)], [100.0, 300.0] * 4
    records = [timed("ring", unsteady), timed("ulysses", steady), timed("usp", unsteady)]
    assert verdict(cells_of(records)).certainty.endswith("; the steps of 2 are unstable, see their notes.")
    assert "unstable" not in verdict(cells_of([timed("ulysses", steady)])).certainty
