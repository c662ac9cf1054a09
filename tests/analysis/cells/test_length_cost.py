import itertools
import re

import numpy as np
import pytest

from analysis.answers.length_cost import length_cost_lines
from analysis.cells.length_cost import MIN_LENGTHS, LengthCost, LengthCosts, Term, fitted, length_costs
from analysis.tables.length_cost import HEADINGS, length_cost_rows
from tests.analysis.predictions import make_predicted
from tests.analysis.records import make_failure, make_record, make_timing

LENGTHS = [8192, 16384, 32768, 65536, 98304]


def step_ms(length, fixed, linear, quadratic):
    return fixed + linear * length / 1024 + quadratic * (length / 1024) ** 2


def sweep(lengths=LENGTHS, strategy="ulysses", terms=(1900.0, 20.0, 0.4), noise=0.0):
    random = np.random.default_rng(0)
    return [
        make_record(
            config={"seq_len": length, "strategy": strategy},
            timing=make_timing([[step_ms(length, *terms) * (1 + noise * random.normal())] * 8] * 2, length),
        )
        for length in lengths
    ]


@pytest.mark.parametrize("terms", [(1900.0, 20.0, 0.4), (0.0, 20.0, 0.0), (5.0, 0.0, 0.001)])
def test_the_terms_of_exact_times_are_found(terms):
    assert fitted(LENGTHS, [step_ms(length, *terms) for length in LENGTHS]) == pytest.approx(terms, abs=1e-9)


def test_no_term_is_negative_and_no_choice_of_them_fits_better():
    """Times that grow by less than their length pull the square below zero."""
    times = [100.0, 190.0, 330.0, 560.0, 700.0]
    found = fitted(LENGTHS, times)
    assert found.min() == 0

    def misfit(terms):
        fits = [step_ms(length, *terms) / time for length, time in zip(LENGTHS, times, strict=True)]
        return sum((fit - 1) ** 2 for fit in fits)

    grids = (np.linspace(0, 2 * most, 41) for most in (100.0, 12.0, 0.2))
    assert misfit(found) <= min(map(misfit, itertools.product(*grids)))


def test_short_lengths_count_as_much_as_long_ones():
    """A tenth more at the longest length moves a fixed cost less than a tenth."""
    times = [step_ms(length, 1900.0, 20.0, 0.4) for length in LENGTHS]
    assert fitted(LENGTHS, [*times[:-1], 1.1 * times[-1]])[0] == pytest.approx(1900.0, rel=0.1)


def test_fewer_lengths_than_it_takes_are_not_split_and_it_says_why(cells_of):
    costs = length_costs(cells_of(sweep(LENGTHS[:3])))
    assert not costs.split
    (line,) = length_cost_lines(costs)
    assert line == (
        "A step's time is split into fixed, linear and quadratic cost where a series has a result at 4 or"
        " more lengths; ulysses has 3."
    )
    assert length_costs(cells_of(sweep(LENGTHS[:1]))) == LengthCosts([], [])


def test_a_length_without_a_result_does_not_count(cells_of):
    failed = make_failure("out_of_memory", "no", config={"seq_len": 131072})
    costs = length_costs(cells_of([*sweep(LENGTHS[: MIN_LENGTHS - 1]), failed]))
    assert (len(costs.split), [each.lengths for each in costs.too_few]) == (0, [3])


def test_measured_and_predicted_sweeps_are_split_apart(cells_of):
    predicted = [
        make_predicted(config={"seq_len": length}, step_ms=(1.0, 2.0 * length / 1024, 10000.0))
        for length in LENGTHS
    ]
    costs = length_costs(cells_of([*sweep(), *predicted]))
    found = {each.is_predicted: [term.value for term in each.terms] for each in costs.split}
    assert found[False] == pytest.approx([1900.0, 20.0, 0.4])
    assert found[True] == pytest.approx([0.0, 2.0, 0.0], abs=1e-9)


def test_the_fixed_cost_explains_how_tokens_per_s_change_with_the_length(cells_of):
    costs = length_costs(cells_of(sweep([8192, 16384, 32768, 65536])))
    (line,) = length_cost_lines(costs)
    # 8k: 1,900 of 2,085.6 ms; 64k: 1,900 of 4,818.4 ms; 8 * 2,085.6 / 4,818.4; 8 * 185.6 / 2,918.4.
    assert line == (
        "ulysses: 1,900 ms of a step are fixed (1,900 to 1,900 ms with any one length left out), 91.1 % of it"
        " at 8k and 39.4 % of it at 64k; tokens/s at 64k are 3.46 times those at 8k; without it they would be"
        " 0.51 times those."
    )
    (row,) = length_cost_rows(costs.split)
    told = dict(zip(HEADINGS, row, strict=True))
    assert told["fixed (ms)"] == "1,900 (1,900 to 1,900)"
    assert told["of the shortest step"] == "91 / 8 / 1 %"


@pytest.mark.parametrize(
    ("terms", "largest"),
    [
        ((1000.0, 50.0, 1.0), [(0, 0), (1, 20), (2, 50)]),
        ((1000.0, 1.0, 0.1), [(0, 0), (2, 100)]),
        ((0.0, 5.0, 0.5), [(1, 0), (2, 10)]),
        ((7.0, 0.0, 0.0), [(0, 0)]),
    ],
)
def test_the_largest_part_changes_where_two_are_equal(terms, largest):
    fixed, linear, quadratic = (Term(value, value, value) for value in terms)
    cost = LengthCost(
        name="ring",
        is_predicted=False,
        lengths=(1024, 2048),
        step_ms=(1.0, 2.0),
        terms=(fixed, linear, quadratic),
        largest_misfit=0.0,
    )
    assert [(term, start / 1024) for term, start in cost.dominant] == [
        (term, pytest.approx(start, rel=1e-6)) for term, start in largest
    ]


def test_times_that_are_no_such_sum_are_told_to_be_misfitted(cells_of):
    records = sweep()
    records[2]["timing"] = make_timing([[9000.0] * 8] * 2)
    (line,) = length_cost_lines(length_costs(cells_of(records)))
    assert re.search(r"; the fitted times are off by up to \d\d\.\d %\.$", line)


def test_noise_shows_as_a_range_and_a_misfit(cells_of):
    (cost,) = length_costs(cells_of(sweep(noise=0.05))).split
    assert cost.terms[0].low < cost.terms[0].value < cost.terms[0].high
    assert 0.001 < cost.largest_misfit < 0.2
