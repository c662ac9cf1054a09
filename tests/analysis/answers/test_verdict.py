import pytest

from analysis.answers.leaders import rankings
from analysis.answers.no_result import MAX_SERIES_NAMED
from analysis.answers.verdict import verdict
from analysis.cells.cells import CPU_CAVEAT, SHARED_GPU_CAVEAT
from tests.support.records import (
    CPU,
    SHARED_GPU,
    STEPS_HELD,
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_timing,
)


def timed(strategy, steps_ms, **config):
    return make_record(config={"strategy": strategy} | config, timing=make_timing([steps_ms] * 2))


def repeated(strategy, processes_ms, **config):
    """A process for each of these times of a step."""
    return [
        timed(strategy, [ms] * 20, **config) | {"repeat": repeat} for repeat, ms in enumerate(processes_ms)
    ]


def test_the_fastest_strategy_of_a_length_is_named_where_six_processes_of_each_show_it(cells_of):
    fast, slow = [100.0, 101.0, 102.0, 99.0, 98.0, 97.0], [200.0, 202.0, 204.0, 198.0, 196.0, 194.0]
    found = verdict(cells_of([*repeated("ulysses", fast), *repeated("ring", slow)]))
    assert found.answer == "Faster: ulysses than ring at 8k."
    assert found.details == ["8k: ulysses, 82,332 tokens/s, 2.00 (1.94 to 2.06) times ring"]
    assert found.to_decide is None
    assert found.fits == [
        "No cell ran out of memory; the highest peak allocated was 2.5 % of capacity (ring at 8k)."
    ]


def test_those_that_ran_often_enough_are_compared_and_the_others_are_named(cells_of):
    sure = [*repeated("ulysses", [100.0] * 6), *repeated("ring", [200.0] * 6)]
    found = verdict(cells_of([*sure, *repeated("usp", [900.0] * 5)]))
    assert found.answer == "Faster: ulysses than ring at 8k."
    assert found.details[0].endswith("times ring; too few processes to compare: usp: 9,102")


def test_processes_that_overlap_are_no_clear_difference_and_none_of_them_is_named(cells_of):
    ms = [100.0, 101.0, 102.0, 99.0, 98.0, 97.0]
    records = [*repeated("ulysses", ms), *repeated("ring", ms[::-1]), *repeated("usp", [900.0] * 6)]
    found = verdict(cells_of(records))
    assert found.answer == "No difference above 5 %: ring and ulysses at 8k."
    assert found.details[0].count("no difference above 5 %") == 1


def test_processes_that_spread_leave_no_clear_difference(cells_of):
    ms = [100.0, 120.0, 140.0, 90.0, 80.0, 70.0]
    found = verdict(cells_of([*repeated("ulysses", ms), *repeated("ring", ms[::-1])]))
    assert found.answer == "No clear difference: ring and ulysses at 8k."


def test_what_decides_a_sweep_with_open_repeats_is_a_larger_budget(cells_of):
    """For the two fastest strategies that split the sequence; `local` is the base."""
    speeds = (("local", 50.0), ("ulysses", 100.0), ("ring", 110.0), ("usp", 120.0))
    records = [timed(name, [ms] * 8, **{"measure.repeats": "auto"}) | {"wall_s": 60.0} for name, ms in speeds]
    said = verdict(cells_of(records), "go {}".format).to_decide
    assert said == (
        "6 or more interleaved processes of the two fastest strategies would decide; run: go"
        " measure.repeats_budget_s=1000 (about 10 min)"
    )


def test_lengths_with_and_without_an_answer_stand_in_one(cells_of):
    sure = [*repeated("ulysses", [100.0] * 6), *repeated("ring", [200.0] * 6)]
    found = verdict(cells_of([*sure, *grid(["ulysses", "ring"], [16384])]))
    assert found.answer == "Faster: ulysses than ring at 8k. Undecided: 16k (one process each)."
    assert found.details[1].startswith("16k, in tokens/s: ring: ")
    assert found.details[1].endswith("; undecided: one process each")


def test_an_observed_loop_is_told_of_its_script_and_of_no_key_of_ours(cells_of):
    both = grid(["ulysses", "ring"], [8192])
    observed = [each | {"role": "observed"} for each in both]
    assert verdict(cells_of(observed)).to_decide.endswith(
        "would decide: start each observed script 6 times, one script after the other, with the same folder"
        " in bench.observe."
    )
    mixed = verdict(cells_of([both[0], observed[1]])).to_decide
    assert "run one sweep with measure.repeats=6; start each observed script 6 times" in mixed


def test_neither_different_work_nor_provenances_are_compared(cells_of):
    other = timed("ring", [200.0] * 8)
    for each in (timed("ring", [200.0] * 8, engine="fsdp2"), other | {"provenance": "replayed"}):
        answer = verdict(cells_of([timed("ulysses", [100.0] * 8), each])).answer
        assert "no strategy is ahead" in answer


def test_cells_with_unstable_steps_are_named_where_the_answer_says_how_sure_it_is(cells_of):
    found = verdict(cells_of([timed("ring", [100.0, 130.0, 160.0, 190.0, 220.0, 250.0])]))
    assert found.certainty.endswith("; unstable steps (see the notes): ring at 8k.")


def test_where_memory_ran_out_it_is_told_first_and_the_longest_length_that_fits_per_strategy(cells_of):
    records = [
        *(timed("ulysses", [100.0] * 8, seq_len=length) for length in (8192, 16384)),
        make_failure("out_of_memory", "no", config={"seq_len": 65536}),
        make_failure("out_of_memory", "no", config={"seq_len": 32768}),
        timed("ring", [100.0] * 8, seq_len=65536),
        make_failure("crashed", "no", config={"strategy": "ring", "seq_len": 131072}),
        make_failure("out_of_memory", "no", config={"strategy": "usp"}),
    ]
    found = verdict(cells_of(records))
    (longest,) = found.fits
    assert longest == (
        "Longest length that fits in memory: ulysses 16k (32k runs out); usp none (8k runs out);"
        " ring 64k (limit not found)."
    )
    assert found.failures == [
        "Out of memory: usp at 8k; ulysses at 32k and 64k.",
        "Crashed: ring at 128k.",
    ]


def test_of_too_many_settings_the_first_are_named_and_the_rest_counted(cells_of):
    records = [
        make_failure("out_of_memory", "no", config={"batch": 1 + i}) for i in range(MAX_SERIES_NAMED + 5)
    ]
    (sentence,) = verdict(cells_of(records)).fits
    assert sentence.count("runs out") == MAX_SERIES_NAMED
    assert sentence.endswith("; and 5 more settings; all cells are in summary.csv.")


TO_DECIDE = (
    "Differences may be chance: 8k (one process each). 6 or more interleaved processes of each cell would"
    " decide on this CPU; run: go (about 45 s)"
)


@pytest.mark.parametrize(
    ("where", "caveat", "to_decide"), [(CPU, CPU_CAVEAT, TO_DECIDE), (SHARED_GPU, SHARED_GPU_CAVEAT, None)]
)
def test_a_result_that_ranks_nothing_says_what_ran_with_figures_by_name_and_no_winner(
    cells_of, where, caveat, to_decide
):
    records = [timed(s, [t] * 8, **where) for s, t in (("ulysses", 1.0), ("ring", 900.0))]
    found = verdict(
        cells_of([*records, timed("ring", [100.0] * 8, engine="fsdp2", **where)]), lambda word: "go"
    )
    assert found.to_decide == to_decide
    assert found.caveat == verdict(cells_of([*records, make_record()])).caveat == caveat
    assert "ring (fsdp2), ring (zero3) and ulysses (zero3) at 8k" in found.answer
    assert "Faster" not in found.answer
    assert found.details == [
        "8k, in tokens/s: ring, fsdp2: 81,920",
        "8k, in tokens/s: ring, zero3: 9,102; ulysses, zero3: 8,192,000",
    ]


def test_one_strategy_alone_is_said_to_have_run_and_compared_with_nothing(cells_of):
    records = [timed("local", [100.0] * 8, checkpointing=is_on) for is_on in (True, False)]
    assert verdict(cells_of(records)).answer.startswith(
        "Ran and passed every check: local (checkpointing=True)"
    )


def test_what_no_check_reached_is_said_and_then_nobody_claims_every_check(cells_of):
    held = {**STEPS_HELD, "steps": 3, "of_steps": 5}
    missing = [
        {"what": what, "against": "float64", "reason": "no time"} for what in ("objective", "full length")
    ]
    records = [
        make_record(config=CPU | {"strategy": "ring"}, checks=[held, missing[0]]),
        make_record(config=CPU | {"strategy": "ulysses"}, checks=[held, *missing]),
        make_record(config=CPU | {"strategy": "usp"}, checks=None),
        make_failure("killed", "x", config=CPU | {"strategy": "local"}),
    ]
    found = verdict(cells_of(records))
    assert found.answer == "Ran: ring, ulysses and usp at 8k."
    assert found.unchecked == [
        "Losses of 4 of 10 steps are not compared with another cell's.",
        "Not checked: objective in 2 of 2 cells; full length in 1 of 2 cells.",
        "The records of 1 of 3 cells do not say what was checked.",
    ]


def test_of_an_observed_loop_the_headline_says_check_by_check_what_was_checked(cells_of):
    made, missing = ({"what": what, "against": "float64", "steps": 1} for what in ("attention", "tokens"))
    missing = missing | {"what": "objective", "reason": "no loss was given", "steps": None}
    loop = make_record(config=CPU, checks=[made, missing]) | {"role": "observed"}
    assert verdict(cells_of([loop])).answer == (
        "Ran: ulysses at 8k. Of ulysses at 8k checked: attention; not checked: objective (no loss was given)."
    )
    assert "Of ulysses" not in verdict(cells_of([make_record(config=CPU, checks=[made, missing])])).answer


def test_how_sure_says_n_and_how_many_intervals_there_are(cells_of):
    steady = [100.0 + step for step in range(8)]
    one_step = verdict(cells_of([timed("ulysses", steady), timed("ring", [200.0])])).certainty
    assert "2 cells with n=1 to 8 steps of one process; 1 of 2 have a 95 % interval" in one_step


def predicted(strategy, step_ms, seq_len=8192, **prediction):
    return make_predicted(config={"strategy": strategy, "seq_len": seq_len}, step_ms=step_ms, **prediction)


def test_predictions_are_compared_at_equal_rates_and_lack_no_process(cells_of):
    """Of bands that overlap, those that are apart at each end by more than the model leaves out."""
    times = {"ulysses": (80.0, 100.0, 125.0), "usp": (83.2, 104.0, 130.0), "ring": (96.0, 120.0, 150.0)}
    records = [predicted(strategy, step_ms) for strategy, step_ms in times.items()]
    found = verdict(cells_of(records), "python run_sweep.py")
    assert found.answer == "Predicted fastest, without a clear lead: ulysses at 8k."
    (line,) = found.details
    assert line.startswith("8k, predicted: ulysses, 81,920 (65,536 to 102,400) tokens/s;")
    assert line.endswith("; no clear difference: usp; slower: ring by 16.7 %")
    assert (found.to_decide, found.unchecked) == (None, [])
    assert found.fits == []
    assert found.certainty.startswith(
        "How sure: 3 cells predicted by a model with the rates of hardware=h100_80gb; nothing ran. Their"
        " tokens/s may be off by -20.0 % to +25.0 %: the band of the model, not a confidence interval."
    )
    alone = verdict(cells_of([record for record in records if record["config"]["strategy"] != "usp"]))
    assert alone.answer == "Predicted fastest: ulysses at 8k."


def test_a_prediction_that_differs_at_one_end_of_the_rates_only_is_no_clear_difference(cells_of):
    records = [predicted("ulysses", (80.0, 100.0, 125.0)), predicted("ring", (81.0, 120.0, 150.0))]
    (line,) = verdict(cells_of(records)).details
    assert line.endswith("; no clear difference: ring")


def test_predictions_of_different_batches_are_not_ranked_together(cells_of):
    large = predicted("ulysses", (80.0, 100.0, 125.0))
    large["config"]["batch"] = 4
    found = rankings(cells_of([large, predicted("ring", (96.0, 120.0, 150.0))]))
    assert [len(ranking.cells) for ranking in found] == [1, 1]


def test_a_prediction_that_may_not_fit_leads_only_where_none_fits(cells_of):
    fast = predicted("gather_kv", (8.0, 10.0, 12.5), fit="undecided")
    sure = [predicted("ulysses", (80.0, 100.0, 125.0)), predicted("ring", (96.0, 120.0, 150.0))]
    assert verdict(cells_of([fast, *sure])).answer == "Predicted fastest: ulysses at 8k."
    slow = predicted("ulysses", (80.0, 100.0, 125.0), fit="undecided")
    assert verdict(cells_of([fast, slow])).answer == "Predicted fastest: gather_kv at 8k."


def test_predictions_of_one_length_are_compared_over_degrees(cells_of):
    config = {"cluster.world_size": 8, "strategy": "ulysses"}
    records = [
        make_predicted(config=config | {"sp_degree": degree, "dp_shard": 8 // degree}, step_ms=(ms,) * 3)
        for degree, ms in {4: 100.0, 8: 120.0}.items()
    ]
    (line,) = verdict(cells_of(records)).details
    assert line.endswith("ulysses (sp 4), 81,920 tokens/s; slower: ulysses (sp 8) by 16.7 %")


def test_what_is_predicted_is_never_ranked_with_what_was_measured(cells_of):
    sure = [*repeated("ulysses", [100.0] * 6), *repeated("ring", [200.0] * 6)]
    both = [predicted("ulysses", (80.0, 100.0, 125.0)), predicted("ring", (90.0, 110.0, 140.0))]
    found = verdict(cells_of([*sure, *both]))
    assert found.answer == (
        "Faster: ulysses (measured) than ring (measured) at 8k. Predicted fastest: ulysses, predicted at 8k."
    )
    assert len(found.details) == 2
    assert found.certainty.count("How sure:") == 2


def test_memory_that_is_predicted_is_told_as_such(cells_of):
    fits = {8192: "fits", 16384: "undecided", 32768: "out_of_memory"}
    records = [predicted("ring", (1.0, 2.0, 3.0), length, fit=fit) for length, fit in fits.items()]
    found = verdict(cells_of([*records, make_failure("out_of_memory", "no", config={"seq_len": 4096})]))
    assert found.failures == [
        "Out of memory: ulysses, measured at 4k.",
        "Predicted to run out of memory: ring, predicted at 32k.",
        "Not decided by the model whether there is memory: ring, predicted at 16k.",
    ]
    assert found.fits == [
        "Longest length that fits in memory: ulysses, measured none (4k runs out).",
        "Longest length predicted to fit in memory: ring, predicted 8k (16k undecided, 32k runs out).",
    ]


def test_predictions_for_a_cpu_did_not_run_and_passed_no_check(cells_of):
    cells = [predicted("ring", (1.0, 2.0, 3.0)), make_record(config={"seq_len": 4096})]
    on_cpu = [each | {"config": each["config"] | CPU} for each in cells]
    assert verdict(cells_of(on_cpu)).answer == (
        "Ran and passed every check: ulysses (measured) at 4k. Predicted: ring (predicted) at 8k."
    )
