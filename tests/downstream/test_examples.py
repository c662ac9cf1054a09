"""The example in the docstring of every public function runs as it is written."""

import doctest
import gc
import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import bench
from bench.attention.kernels import KERNELS
from bench.common.environment import REPOSITORY
from tests.support.cells import make_cell
from tests.support.scripts.own_loop import NUMBERS, VOCABULARY

SWEEP = "results/sweeps/NAME/records.jsonl"
STEPS = 20 + 2 + 8
"""Steps after which `bench.observe` with its default arguments adds its record."""
FUNCTIONS = [
    name
    for name in bench.__all__
    if inspect.isfunction(getattr(bench, name)) or name == "ObserveCallback"
]  # fmt: skip


def example(function):
    """Return the first block of a docstring that is indented or has results, without its indentation."""
    blocks = inspect.getdoc(function).split("\n\n")
    (first, *_) = [block for block in blocks if block.startswith(("    ", ">>>"))]
    return textwrap.dedent(first)


def tensors():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    return {"q": q, "k": k, "v": v, "scale": 16**-0.5, "strategy": SimpleNamespace(kernel=KERNELS["math"])}


def training(folder):
    """Return what the examples with a model need: the model, its batches, and a Trainer's arguments."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**NUMBERS, attn_implementation="sdpa"))
    ids = torch.randint(VOCABULARY, (STEPS, 1, 32))
    names = {
        "model": model, "group": None, "sequence_group": None,
        "loader": [{"input_ids": row, "labels": row} for row in ids],
        "optimizer": torch.optim.AdamW(model.parameters()),
        "Trainer": Trainer, "rows": [{"input_ids": row[0], "labels": row[0]} for row in ids],
        "arguments": TrainingArguments(
            str(folder / "trainer"), per_device_train_batch_size=1, max_steps=STEPS, use_cpu=True,
            report_to="none", save_strategy="no",
        ),
    }  # fmt: skip
    places = torch.arange(32).expand(1, 32)
    packed = {"documents": places // 16, "positions": places, "position_ids": places % 16}
    return names | packed | {"input_ids": ids[0]}


@pytest.fixture
def _one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gc.collect()
    gc.freeze()  # a traced step searches all objects for another profiler, which is slow
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.unfreeze()


PROMPTS = [name for name in FUNCTIONS if ">>>" in example(getattr(bench, name))]


@pytest.mark.parametrize("name", PROMPTS)
def test_example_with_results_gives_these_results(name):
    cell = make_cell("model=qwen3_nano", "seq_len=8k", "strategy=ring")
    names = tensors() | {"bench": bench, "torch": torch, "cell": cell, "replace": replace}
    text = example(getattr(bench, name))
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(doctest.DocTestParser().get_doctest(text, names, name, None, None))
    assert (runner.summarize().failed, runner.tries > 0) == (0, True)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "ObserveCallback" else ())
        for name in FUNCTIONS
        if name not in PROMPTS
    ],
)
def test_example_of_a_run_does_what_it_says(name, tmp_path):
    (tmp_path / SWEEP).parent.mkdir(parents=True)
    (tmp_path / SWEEP).symlink_to(REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl")
    names = training(tmp_path) | {"bench": bench}
    exec(example(getattr(bench, name)), names)  # noqa: S102
    if name in ("observe", "ObserveCallback"):
        (record,) = bench.read_records(tmp_path / "results" / "observed" / "records.jsonl")
        assert (record.status.value, len(record.timing.step_times_ms[0])) == ("ok", 20)
    elif name == "probe":
        assert names["moved"]["model"].own_outputs > 0
    else:
        assert len(names["records"]) == 9


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("kind", [str, Path])
def test_functions_take_paths_as_text_or_path(tmp_path, kind):
    model = training(tmp_path)["model"]
    observation = bench.observe(model, folder=kind(tmp_path / "a"))
    assert observation is bench.observe(model, folder=str(tmp_path / "a"))
    callback = bench.ObserveCallback(folder=kind(tmp_path / "a"))
    callback.on_train_begin(model=model)
    records = REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl"
    assert len(bench.read_records(kind(records))) == 9
