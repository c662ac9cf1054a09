"""Loops with many frameworks have the same losses, bit for bit, with and without `bench.observe`."""

import io
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import partial

import pytest

import bench
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.records import read_lines
from tests.support.scripts.other_loops import LOOPS

COVER = ("profiler_in_a_step", "fsdp2", "transformers_trainer", "all_collectives")
"""The most different loops. The others are marked slow."""
OUTCOMES = {
    "profiler_in_a_step": ("error", "a profiler was started in a step that was traced"),
    ("one_model", 2): ("wrong_result", "replicas of model.embed_tokens.weight differ on ranks 0, 1"),
}
"""Status of the record and text of the first message; all other loops are `ok`."""
STATING = ("alst", "transformers_trainer", "fsdp2_context_parallel")
"""Right loops that state a loss, so that their objective is checked."""
ONCE_A_PROCESS = ("alst",)
"""Loops that need a process of their own: DeepSpeed sets up its Ulysses only once in a process."""
SHORT = {"steps": 1, "warmup_steps": 0, "report": False}


def train(job, log):
    """Train the loop in the ways that the folder's name lists, `NAME-plain-observed`."""
    join(job)
    name, *ways = job.folder.name.split("-")
    losses, output = {}, io.StringIO()
    context = {
        "plain": lambda *_, **__: nullcontext(),
        "observed": partial(bench.observe, folder=job.folder, **SHORT),
    }
    for way in ways:
        with redirect_stderr(output), redirect_stdout(output):
            losses[way] = [*LOOPS[name](context[way])]
    messages = [line for line in output.getvalue().splitlines() if line.startswith("bench.observe: ")]
    return losses | {"messages": messages}


def train_on_ranks(launcher, folder, ranks):
    """Return the losses and messages of every rank."""
    folder.mkdir()
    cell = make_cell("strategy=ring", f"cluster.world_size={ranks}", "measure.timeout_s=300")
    ends = launcher.run(cell, folder, entry=train)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    return [end.report for end in ends]


CASES = [pytest.param(name, 2, marks=() if name in COVER else pytest.mark.slow) for name in LOOPS]
ALONE = pytest.param("one_model", 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "ranks"), [*CASES, ALONE])
def test_observed_loop_has_the_losses_of_the_unobserved_one(launcher, tmp_path, name, ranks):
    processes = ("plain", "observed") if name in ONCE_A_PROCESS else ("plain-observed",)
    reports = [train_on_ranks(launcher, tmp_path / f"{name}-{ways}", ranks) for ways in processes]
    for plain, observed in zip(reports[0], reports[-1], strict=True):
        assert len(plain["plain"]) >= 12
        assert observed["observed"] == plain["plain"]
    status, text = OUTCOMES.get((name, ranks)) or OUTCOMES.get(name, ("ok", "tokens/s"))
    message, *_ = reports[-1][0]["messages"]
    assert text in message
    (record,) = read_lines(tmp_path / f"{name}-{processes[-1]}" / "records.jsonl")
    assert record["status"] == status
    reasons = [check["reason"] for check in record["checks"] or () if check["what"] == "objective"]
    assert status != "ok" or (reasons == [None]) is (name in STATING)
