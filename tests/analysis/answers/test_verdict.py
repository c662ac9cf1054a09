import re

import pytest

from analysis.answers.leaders import rankings
from analysis.answers.no_result import MAX_SERIES_NAMED
from analysis.answers.verdict import verdict
from analysis.cells.cells import CPU_CAVEAT, SHARED_GPU_CAVEAT
from tests.support.records import (
    CPU,
    SHARED_GPU,
    TRAINING_COMPARED,
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_timing,
)


def timed(strategy, steps_ms, **config):
    return make_record(config={"strategy": strategy} | config, timing=make_timing([steps_ms] * 2))


def repeated(strategy, processes_ms, **config):
    """Return a record of a process for each step time."""
    return [
        timed(strategy, [ms] * 20, **config) | {"repeat": repeat} for repeat, ms in enumerate(processes_ms)
    ]


def test_faster_strategy_is_named_after_six_processes_each(cells_of):
    fast, slow = [100.0, 101.0, 102.0, 99.0, 98.0, 97.0], [200.0, 202.0, 204.0, 198.0, 196.0, 194.0]
    found = verdict(cells_of([*repeated("ulysses", fast), *repeated("ring", slow)]))
    assert found.answer == "ulysses is faster than ring at 8k."
    assert found.details == ["8k: ulysses, 82,332 tokens/s, 2.00 times ring (95 % interval 1.94 to 2.06)"]
    assert found.to_decide is None
    (sentence,) = found.fits
    assert sentence.startswith("No cell ran out of memory.")
    assert "of ring at 8k, was 2.5 % of the capacity" in sentence


def test_cells_with_too_few_processes_are_named_not_compared(cells_of):
    sure = [*repeated("ulysses", [100.0] * 6), *repeated("ring", [200.0] * 6)]
    found = verdict(cells_of([*sure, *repeated("usp", [900.0] * 5)]))
    assert found.answer == "ulysses is faster than ring at 8k."
    assert found.details[0].endswith("; too few processes to compare: usp 9,102 tokens/s")


def test_level_strategies_have_no_winner(cells_of):
    ms = [100.0, 101.0, 102.0, 99.0, 98.0, 97.0]
    records = [*repeated("ulysses", ms), *repeated("ring", ms[::-1]), *repeated("usp", [900.0] * 6)]
    found = verdict(cells_of(records))
    assert found.answer == "ring and ulysses differ by less than 5 % at 8k."
    assert found.details[0].count("no difference above 5 %") == 1


def test_wide_spread_gives_no_clear_difference(cells_of):
    ms = [100.0, 120.0, 140.0, 90.0, 80.0, 70.0]
    found = verdict(cells_of([*repeated("ulysses", ms), *repeated("ring", ms[::-1])]))
    assert found.answer == "ring and ulysses show no clear difference at 8k."


def test_open_repeats_are_decided_by_a_larger_budget(cells_of):
    """For the two fastest strategies that split the sequence; `local` is the base."""
    speeds = (("local", 50.0), ("ulysses", 100.0), ("ring", 110.0), ("usp", 120.0))
    records = [timed(name, [ms] * 8, **{"measure.repeats": "auto"}) | {"wall_s": 60.0} for name, ms in speeds]
    sentence = verdict(cells_of(records), "go {}".format).to_decide
    assert "6 or more interleaved processes of the two fastest strategies" in sentence
    assert sentence.endswith("Run: go measure.repeats_budget_s=1000 (about 10 min)")


def test_answer_has_decided_and_undecided_lengths(cells_of):
    sure = [*repeated("ulysses", [100.0] * 6), *repeated("ring", [200.0] * 6)]
    found = verdict(cells_of([*sure, *grid(["ulysses", "ring"], [16384])]))
    assert found.answer == (
        "ulysses is faster than ring at 8k. Comparisons are undecided at 16k (one process each)."
    )
    assert found.details[1].startswith("16k: ring ")
    assert found.details[1].endswith("; undecided: one process each")


def test_observed_loops_are_decided_by_starting_scripts_again(cells_of):
    both = grid(["ulysses", "ring"], [8192])
    observed = [record | {"role": "observed"} for record in both]
    to_decide = verdict(cells_of(observed)).to_decide
    assert "start each observed script 6 times" in to_decide
    assert to_decide.endswith("in bench.observe.")
    assert "=" not in to_decide
    mixed = verdict(cells_of([both[0], observed[1]])).to_decide
    assert "run one sweep with measure.repeats=6; start each observed script 6 times" in mixed


def test_different_work_and_provenance_are_not_compared(cells_of):
    other = timed("ring", [200.0] * 8)
    for record in (timed("ring", [200.0] * 8, engine="fsdp2"), other | {"provenance": "replayed"}):
        answer = verdict(cells_of([timed("ulysses", [100.0] * 8), record])).answer
        assert "no strategy is ahead" in answer


def test_confidence_names_cells_with_unstable_steps(cells_of):
    found = verdict(cells_of([timed("ring", [100.0, 130.0, 160.0, 190.0, 220.0, 250.0])]))
    assert found.certainty.endswith("The step times of ring at 8k are unstable; see the notes.")


def test_out_of_memory_comes_first_with_the_longest_lengths(cells_of):
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
        "Longest length that fits in memory: ulysses: 16k (32k runs out); usp: none (8k runs out);"
        " ring: at least 64k."
    )
    assert found.failures == [
        "Out of memory: usp at 8k; ulysses at 32k and 64k.",
        "Crashed: ring at 128k.",
    ]


def test_longest_lengths_of_many_settings_are_cut(cells_of):
    records = [
        make_failure("out_of_memory", "no", config={"batch": 1 + i}) for i in range(MAX_SERIES_NAMED + 5)
    ]
    (sentence,) = verdict(cells_of(records)).fits
    assert sentence.count("runs out") == MAX_SERIES_NAMED
    assert sentence.endswith("; and 5 more settings; all cells are in summary.csv.")


TO_DECIDE = re.compile(
    r"Differences may be chance at 8k \(one process each\)\. .*6 or more .*this CPU.*Run: go \(about 45 s\)"
)


@pytest.mark.parametrize(
    ("where", "caveat", "to_decide"), [(CPU, CPU_CAVEAT, TO_DECIDE), (SHARED_GPU, SHARED_GPU_CAVEAT, None)]
)
def test_unranked_result_lists_speeds_without_a_winner(cells_of, where, caveat, to_decide):
    records = [timed(s, [t] * 8, **where) for s, t in (("ulysses", 1.0), ("ring", 900.0))]
    found = verdict(
        cells_of([*records, timed("ring", [100.0] * 8, engine="fsdp2", **where)]), lambda word: "go"
    )
    assert found.to_decide is None if to_decide is None else to_decide.fullmatch(found.to_decide)
    assert found.caveat == verdict(cells_of([*records, make_record()])).caveat == caveat
    assert found.answer.startswith("ring (fsdp2), ring (zero3) and ulysses (zero3) ran")
    assert "faster" not in found.answer
    assert found.details == [
        "8k: ring (fsdp2) 81,920 tokens/s",
        "8k: ring (zero3) 9,102; ulysses (zero3) 8,192,000 tokens/s",
    ]


def test_single_strategy_ran_and_is_not_compared(cells_of):
    records = [timed("local", [100.0] * 8, checkpointing=is_on) for is_on in (True, False)]
    assert verdict(cells_of(records)).answer == (
        "local (checkpointing=True) and local (checkpointing=False) ran and passed every check at 8k."
    )


def test_unchecked_steps_and_checks_are_stated(cells_of):
    held = {**TRAINING_COMPARED, "steps": 3, "of_steps": 5}
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
    assert found.answer == "ring, ulysses and usp ran at 8k."
    steps, checks, unknown = found.unchecked
    assert steps.startswith(
        "In 6 of 10 steps (warm-up, timed, inspected and traced), the loss agrees with that of another cell"
    )
    assert checks.startswith("Not checked: objective in 2 of 2 cells; full length in 1 of 2 cells.")
    assert unknown == "The records of 1 of 3 cells do not say what was checked."


def test_answer_on_an_observed_loop_lists_its_checks(cells_of):
    made, missing = ({"what": what, "against": "float64", "steps": 1} for what in ("attention", "tokens"))
    missing = missing | {"what": "objective", "reason": "no loss was given", "steps": None}
    loop = make_record(config=CPU, checks=[made, missing]) | {"role": "observed"}
    assert verdict(cells_of([loop])).answer == (
        "ulysses ran at 8k. Observed loop ulysses at 8k, checked: attention; not checked: objective (no loss"
        " was given)."
    )
    assert "Observed loop" not in verdict(cells_of([make_record(config=CPU, checks=[made, missing])])).answer


def test_confidence_counts_runs_steps_and_intervals(cells_of):
    steady = [100.0 + step for step in range(8)]
    once = verdict(cells_of([timed("ulysses", steady), timed("ring", [200.0])])).certainty
    assert "2 cells ran once, with 1 to 8 timed steps" in once
    assert "1 of 2 cells has six or more timed steps" in once
    repeats = verdict(cells_of([*repeated("ulysses", [100.0] * 2), *repeated("ring", [200.0] * 2)])).certainty
    assert repeats == (
        "Confidence: 2 cells ran 2 times. No cell has the six runs that a 95 % interval of the median needs."
    )


def predicted(strategy, step_ms, seq_len=8192, **prediction):
    return make_predicted(config={"strategy": strategy, "seq_len": seq_len}, step_ms=step_ms, **prediction)


def test_predictions_are_compared_at_equal_rates(cells_of):
    """Overlapping bands differ where they differ at both ends by more than the model leaves out."""
    times = {"ulysses": (80.0, 100.0, 125.0), "usp": (83.2, 104.0, 130.0), "ring": (96.0, 120.0, 150.0)}
    records = [predicted(strategy, step_ms) for strategy, step_ms in times.items()]
    found = verdict(cells_of(records), "python run_sweep.py")
    assert found.answer == "ulysses is predicted to be the fastest at 8k, without a clear lead."
    (line,) = found.details
    assert line.startswith("8k, predicted: ulysses, 81,920 (65,536 to 102,400) tokens/s;")
    assert line.endswith("; no clear difference: usp; slower: ring by 16.7 %")
    assert (found.to_decide, found.unchecked) == (None, [])
    assert found.fits == []
    for text in (
        "3 cells",
        "hardware=h100_80gb; nothing ran",
        "-20.0 % to +25.0 %",
        "not a confidence interval",
    ):
        assert text in found.certainty
    alone = verdict(cells_of([record for record in records if record["config"]["strategy"] != "usp"]))
    assert alone.answer == "ulysses is predicted to be the fastest at 8k."


def test_prediction_that_leads_at_one_end_only_is_not_clear(cells_of):
    records = [predicted("ulysses", (80.0, 100.0, 125.0)), predicted("ring", (81.0, 120.0, 150.0))]
    (line,) = verdict(cells_of(records)).details
    assert line.endswith("; no clear difference: ring")


def test_predictions_of_different_batches_are_not_compared(cells_of):
    large = predicted("ulysses", (80.0, 100.0, 125.0))
    large["config"]["batch"] = 4
    found = rankings(cells_of([large, predicted("ring", (96.0, 120.0, 150.0))]))
    assert [len(ranking.cells) for ranking in found] == [1, 1]


def test_prediction_that_may_not_fit_leads_only_if_none_fits(cells_of):
    fast = predicted("gather_kv", (8.0, 10.0, 12.5), fit="undecided")
    sure = [predicted("ulysses", (80.0, 100.0, 125.0)), predicted("ring", (96.0, 120.0, 150.0))]
    assert verdict(cells_of([fast, *sure])).answer == "ulysses is predicted to be the fastest at 8k."
    slow = predicted("ulysses", (80.0, 100.0, 125.0), fit="undecided")
    assert verdict(cells_of([fast, slow])).answer == "gather_kv is predicted to be the fastest at 8k."


def test_predictions_are_compared_across_degrees(cells_of):
    config = {"cluster.world_size": 8, "strategy": "ulysses"}
    records = [
        make_predicted(config=config | {"sp_degree": degree, "dp_shard": 8 // degree}, step_ms=(ms,) * 3)
        for degree, ms in {4: 100.0, 8: 120.0}.items()
    ]
    (line,) = verdict(cells_of(records)).details
    assert line.endswith("ulysses (sp 4), 81,920 tokens/s; slower: ulysses (sp 8) by 16.7 %")


def test_predictions_and_measurements_are_ranked_separately(cells_of):
    sure = [*repeated("ulysses", [100.0] * 6), *repeated("ring", [200.0] * 6)]
    both = [predicted("ulysses", (80.0, 100.0, 125.0)), predicted("ring", (90.0, 110.0, 140.0))]
    found = verdict(cells_of([*sure, *both]))
    assert found.answer == (
        "ulysses (measured) is faster than ring (measured) at 8k."
        " ulysses (predicted) is predicted to be the fastest at 8k."
    )
    assert len(found.details) == 2
    assert found.certainty.count("Confidence:") == 2


def test_predicted_memory_has_sentences_of_its_own(cells_of):
    fits = {8192: "fits", 16384: "undecided", 32768: "out_of_memory"}
    records = [predicted("ring", (1.0, 2.0, 3.0), length, fit=fit) for length, fit in fits.items()]
    found = verdict(cells_of([*records, make_failure("out_of_memory", "no", config={"seq_len": 4096})]))
    assert found.failures == [
        "Out of memory: ulysses (measured) at 4k.",
        "Predicted to run out of memory: ring (predicted) at 32k.",
        "The model cannot decide whether these cells fit in memory: ring (predicted) at 16k.",
    ]
    assert found.fits == [
        "Longest length that fits in memory: ulysses (measured): none (4k runs out).",
        "Longest length predicted to fit in memory: ring (predicted): 8k (16k undecided, 32k runs out).",
    ]


def test_predictions_for_a_cpu_do_not_count_as_run(cells_of):
    cells = [predicted("ring", (1.0, 2.0, 3.0)), make_record(config={"seq_len": 4096})]
    on_cpu = [cell | {"config": cell["config"] | CPU} for cell in cells]
    assert verdict(cells_of(on_cpu)).answer == (
        "ulysses (measured) ran and passed every check at 4k. A prediction exists for ring (predicted) at 8k."
    )
