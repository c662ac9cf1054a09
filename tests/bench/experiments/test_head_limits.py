"""`experiment=head_limits`: what a user types, and what stands in the table."""

import csv

import pytest

from bench.request.choices import options, read_option
from bench.strategies import STRATEGIES
from tests.command import typed_here

DEGREES = [1, 2, 4, 8, 16, 32, 64]
MODELS = {name for name in options("model") if "num_heads" in read_option("model", name)}


def ask(folder, *words, columns=80):
    return typed_here(folder, *words, COLUMNS=str(columns))


def limits_in(folder):
    with (folder / "head_limits.csv").open() as file:
        return {(row["model"], row["strategy"], int(row["sp_degree"])): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    done = ask(folder, "experiment=head_limits", "sweep_dir=out")
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "out"


@pytest.fixture(scope="module")
def limits(answered):
    return limits_in(answered[1])


def test_it_answers_for_every_model_strategy_and_degree_and_runs_nothing(answered, limits):
    expected = {
        (model, strategy, degree)
        for model in MODELS
        for strategy, facts in STRATEGIES.items()
        for degree in (DEGREES if facts.shares_sequences else [1])
    }
    assert set(limits) == expected
    assert {path.name for path in answered[1].iterdir()} == {"head_limits.csv", "head_limits.md"}


@pytest.mark.parametrize(
    ("model", "degree", "kv_repeats", "bytes_factor"),
    [
        ("qwen3_4b", 8, "1", 1),  # one KV head a rank
        ("qwen3_4b", 16, "2", (64 + 2 * 16) / (64 + 2 * 8)),  # Q, O of 32 heads and K, V of 16 instead of 8
        ("qwen3_32b", 64, "8", (128 + 2 * 64) / (128 + 2 * 8)),
        ("qwen3_14b", 16, "", None),  # 40 heads
        ("qwen2_5_0_5b", 4, "", None),  # 14 heads
        ("llama2_7b", 32, "1", 1),  # as many KV heads as heads
    ],
)
def test_ulysses_repeats_kv_heads_or_refuses_as_its_heads_demand(
    limits, model, degree, kv_repeats, bytes_factor
):
    row = limits[model, "ulysses", degree]
    assert row["kv_repeats"] == kv_repeats
    assert (row["refusals"] == "") == (bytes_factor is not None)
    assert row["bytes_factor"] == "" or float(row["bytes_factor"]) == pytest.approx(bytes_factor)


@pytest.mark.parametrize(
    ("model", "chosen"), [("qwen3_4b", "8x4"), ("qwen2_5_0_5b", "2x16"), ("llama2_7b", "32x1")]
)
def test_usp_shares_as_many_heads_as_there_are_kv_heads_and_rings_the_rest(limits, model, chosen):
    row = limits[model, "usp", 32]
    assert f"{row['ulysses_degree']}x{row['ring_degree']}" == chosen
    assert (row["refusals"], row["chooses_degrees"]) == ("", "True")


def test_a_ring_takes_every_model_at_every_degree(limits):
    assert {row["refusals"] for (_, strategy, _), row in limits.items() if strategy == "ring"} == {""}


def test_the_page_and_the_terminal_mark_all_three_outcomes_and_give_the_reason(answered):
    for text in (answered[0], (answered[1] / "head_limits.md").read_text()):
        assert "qwen3_14b: 40 query heads, 8 KV heads" in text
        assert {"KVx2", "1.20", "8x4", "no", "yes"} <= set(text.split())
        assert "sp 16, 32, 64: ulysses cannot split 40 query and 8 KV heads" in text


def test_words_narrow_the_question_and_the_table_keeps_to_the_terminal(tmp_path, answered):
    columns = 30
    words = ["sp_degree=2,16", "model=qwen3_4b", "strategy=ulysses,usp", "sweep_dir=o"]
    done = ask(tmp_path, "experiment=head_limits", *words, columns=columns)
    assert done.returncode == 0
    assert set(limits_in(tmp_path / "o")) == {("qwen3_4b", s, d) for s in ("ulysses", "usp") for d in (2, 16)}
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns < max(map(len, answered[0].splitlines()[:-1])) <= 80
    assert last == "table: o/head_limits.md, o/head_limits.csv"
    assert {"sp", "KVx2", "8x2"} <= set(done.stdout.split())


BAD = {
    "an unknown experiment": (["experiment=head_limit"], "did you mean experiment=head_limits?"),
    "two questions at once": (["-m", "experiment=none,head_limits"], "takes one experiment"),
    "a degree that is none": (["experiment=head_limits", "sp_degree=0"], "sp_degree=0: must be a whole"),
    "a strategy that is none": (["experiment=head_limits", "strategy=rng"], "did you mean strategy=ring?"),
    "a key that is none": (["experiment=head_limits", "+foo=1"], "foo"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_one_line_and_exit_code_2_and_leaves_nothing(tmp_path, case):
    words, said = BAD[case]
    done = ask(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
