"""Loops as different as people write them: observed, they have the losses that they have unobserved."""

import io
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
from transformers import trainer

import bench
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.records import read_lines
from tests.support.scripts.other_loops import LOOPS

COVER = ("profiler_in_a_step", "fsdp2", "transformers_trainer", "all_collectives")
"""The most different ones; the others are slow together."""
DIVIDES_TWICE = 'grad_acc_kwargs["num_steps"] = 1' not in Path(trainer.__file__).read_text()
"""Trainer of older transformers, 5.4 for one, has Accelerate divide a loss over counted tokens by the
micro-steps once more: gradients are too small by that factor, whoever looks on."""
OUTCOMES = {
    "profiler_in_a_step": ("error", "a profiler was started in a step that was traced"),
    **({"transformers_trainer": ("wrong_result", "gradients are 0.5 times")} if DIVIDES_TWICE else {}),
    ("one_model", 2): ("wrong_result", "replicas of model.embed_tokens.weight differ on ranks 0, 1"),
}
"""The record's status and what is said; the others are `ok`."""
TELLING = ("alst", "transformers_trainer", "fsdp2_context_parallel")
"""Only these loops give a loss, for the check of their objective."""
ONCE_A_PROCESS = ("alst",)
"""What DeepSpeed sets up for its Ulysses it sets up once."""
SHORT = {"steps": 1, "warmup_steps": 0, "report": False}


def train(job, log):
    """A rank's whole life: the loop and the ways to train it that the folder is named for."""
    join(job)
    name, *ways = job.folder.name.split("-")
    found, said = {}, io.StringIO()
    context = {
        "plain": lambda *_, **__: nullcontext(),
        "observed": partial(bench.observe, folder=job.folder, **SHORT),
    }
    for way in ways:
        with redirect_stderr(said), redirect_stdout(said):
            found[way] = [*LOOPS[name](context[way])]
    own = [line for line in said.getvalue().splitlines() if line.startswith("bench.observe: ")]
    return found | {"said": own}


def train_on_ranks(launcher, folder, ranks):
    """What each rank found."""
    folder.mkdir()
    cell = make_cell("strategy=ring", f"cluster.world_size={ranks}", "measure.timeout_s=300")
    ends = launcher.run(cell, folder, entry=train)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    return [end.report for end in ends]


CASES = [pytest.param(name, 2, marks=() if name in COVER else pytest.mark.slow) for name in LOOPS]
ALONE = pytest.param("one_model", 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "ranks"), [*CASES, ALONE])
def test_observed_a_loop_has_the_losses_that_it_has_unobserved(launcher, tmp_path, name, ranks):
    processes = ("plain", "observed") if name in ONCE_A_PROCESS else ("plain-observed",)
    found = [train_on_ranks(launcher, tmp_path / f"{name}-{ways}", ranks) for ways in processes]
    for plain, observed in zip(found[0], found[-1], strict=True):
        assert len(plain["plain"]) >= 12
        assert observed["observed"] == plain["plain"]
    status, words = OUTCOMES.get((name, ranks)) or OUTCOMES.get(name, ("ok", "tokens/s"))
    said, *_ = found[-1][0]["said"]
    assert words in said
    (record,) = read_lines(tmp_path / f"{name}-{processes[-1]}" / "records.jsonl")
    assert record["status"] == status
    told = [check["reason"] for check in record["checks"] or () if check["what"] == "objective"]
    assert status != "ok" or (told == [None]) is (name in TELLING)
