"""Training stacks train on the native loop's tokens and reach the native loop's losses."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.common.environment import installed_version
from bench.request.legality import refusal
from bench.training.data import open_data
from bench.training.trainer_facts import TRAINER_FACTS
from bench.training.trainers.stack import NEXT_LABELS, StackSamples, batch_place
from tests.support.cells import FOUR_H100, make_cell, run_cell, tiny_cell

PAGE = Path(__file__).parents[3] / "docs" / "stacks.md"
ULYSSES = ("strategy=deepspeed_ulysses", "engine=zero3", "cluster.world_size=2", "sp_degree=2")
TRAINED = ("data=synthetic", "data.prompt_tokens=50", "dtype=fp32", "measure.steps=3", "measure.budget_s=60")
TRIPLES = [
    (trainer, strategy, engine)
    for trainer, facts in TRAINER_FACTS.items()
    for strategy, engines in (facts.engines_by_strategy or {}).items()
    for engine in engines
]


def losses_of(launcher, folder, *words, entry=None):
    record, _ = run_cell(launcher, tiny_cell(*TRAINED, *words), folder, entry)
    assert record.status == "ok", record.reason
    return record.losses


@pytest.fixture(scope="module")
def native(launcher, tmp_path_factory):
    """Losses of the native loop with Ulysses."""
    return losses_of(launcher, tmp_path_factory.mktemp("native"), *ULYSSES)


@pytest.mark.parametrize("trainer", ["accelerate", "transformers"])
def test_stack_with_ulysses_has_the_losses_of_the_native_loop(launcher, tmp_path, native, trainer):
    stack = losses_of(launcher, tmp_path, *ULYSSES, f"trainer={trainer}")
    assert stack.loss == pytest.approx(native.loss, rel=2e-6)
    assert stack.grad_norm == pytest.approx(native.grad_norm, rel=1e-5)
    assert stack.valid_tokens == native.valid_tokens
    assert stack.logged_loss == pytest.approx(stack.loss, rel=1e-6)
    assert stack.logged_max_difference == pytest.approx(0, abs=1e-5)
    assert native.logged_loss is None
    assert native.logged_max_difference is None


def leave_out_the_process_group():
    """Let Accelerate find no process group, as it does on a CPU without our setup."""
    from bench.training.trainers import stack_engines

    stack_engines.set_cpu_process_group = lambda *_: None


def test_gate_finds_sequences_that_every_rank_trains_on(launcher, tmp_path):
    cell = tiny_cell(*TRAINED, *ULYSSES, "trainer=transformers")
    record, _ = run_cell(launcher, cell, tmp_path, run_changed(leave_out_the_process_group))
    assert record.status == "wrong_result"
    assert "step 1: the ranks saw other tokens than the step holds" in record.reason


def run_changed(change):
    """Return an entry of rank processes that runs a cell after `change`."""
    return partial(_change_and_run, change)


def _change_and_run(change, job, log):
    from bench.run.node.worker import run_cell as run_in_rank

    change()
    return run_in_rank(job, log)


def checks_by_name(record):
    return {check.what: check for check in record.checks}


def return_the_loss_alone():
    """Make the model return its loss without logits."""
    from transformers import Qwen3ForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    forward = Qwen3ForCausalLM.forward

    def forward_without_logits(self, **named):
        return CausalLMOutputWithPast(loss=forward(self, **named).loss)

    Qwen3ForCausalLM.forward = forward_without_logits


def test_stack_without_logits_has_no_loss_by_position(launcher, tmp_path):
    cell = tiny_cell(*TRAINED, "strategy=local", "engine=ddp", "trainer=accelerate")
    record, _ = run_cell(launcher, cell, tmp_path, run_changed(return_the_loss_alone))
    assert (record.status, record.losses.by_position) == ("ok", None), record.reason
    reason = "the model returned neither logits nor log-probabilities of the labels"
    assert checks_by_name(record)["loss by position"].reason == reason


def enable_the_formula():
    """Make torch's attention take the formula, as a library that enables its own backends might."""
    from torch.nn.attention import SDPBackend

    from bench.training.trainers import stack

    stack.SDPA_BACKENDS = {"torch_flash": SDPBackend.MATH}


def test_another_kernel_than_the_named_one_is_found(launcher, tmp_path):
    words = ("strategy=local", "engine=ddp", "trainer=accelerate", "seq_len=512", "measure.trace=true")
    record, _ = run_cell(launcher, tiny_cell(*TRAINED, *words), tmp_path)
    check = checks_by_name(record)["attention kernel"]
    assert (record.status, check.reason, check.tokens) == ("ok", None, 512), record.reason
    record, _ = run_cell(
        launcher, tiny_cell(*TRAINED, *words), tmp_path / "wrong", run_changed(enable_the_formula)
    )
    assert record.status == "wrong_result"
    operator = "aten::_scaled_dot_product_attention_math"
    assert record.reason == f"the traced step ran {operator}, not kernel=torch_flash"


PACKED = (
    "data=synthetic",
    "data.packing=documents",
    "seq_len=512",
    "measure.budget_s=60",
    "trainer=transformers",
)


def test_stack_keeps_attention_within_packed_documents(launcher, tmp_path):
    """transformers masks documents if their positions restart."""
    cell = tiny_cell(*PACKED, "strategy=local", "engine=zero3", "cluster.world_size=2", "dp_shard=2")
    record, _ = run_cell(launcher, cell, tmp_path)
    assert record.status == "ok", record.reason
    assert min(record.documents.documents) > 2
    assert record.full_length.errors["out"] < record.full_length.limits["out"]


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ((), "attention across the boundaries of documents; take trainer=native (docs/stacks.md)"),
        (("objective",), "attention at 512 tokens: out of the sampled rows is off by"),
    ],
)
def test_stack_whose_attention_crosses_documents_is_wrong(launcher, tmp_path, without, reason):
    """DeepSpeed drops the mask of documents, as the documentation of transformers warns."""
    record, _ = run_cell(launcher, tiny_cell(*PACKED, *ULYSSES), tmp_path, without=without)
    assert record.status == "wrong_result"
    assert reason in record.reason


def test_number_of_labels_that_fsdp2_rounds_is_found(launcher, tmp_path):
    """FSDP2 casts the Trainer's number of labels, a float, to bf16: 666 becomes 664."""
    cell = tiny_cell(
        *PACKED, "strategy=local", "engine=fsdp2", "cluster.world_size=2", "dp_shard=2", "seed=9"
    )
    record, _ = run_cell(launcher, cell, tmp_path)
    assert record.status == "wrong_result"
    assert re.search(r"; a factor of 1\.00\d\d on the whole gradient would explain it$", record.reason)


@pytest.mark.parametrize("trainer", ["accelerate", "transformers"])
def test_padded_stack_has_the_losses_of_the_native_loop(launcher, tmp_path, trainer):
    words = (*ULYSSES, "seq_len=255", "pad=true")
    native = losses_of(launcher, tmp_path, *words)
    stack = losses_of(launcher, tmp_path, *words, f"trainer={trainer}")
    assert stack.loss == pytest.approx(native.loss, rel=2e-6)
    assert stack.valid_tokens == native.valid_tokens
    assert stack.tokens_digest == native.tokens_digest


SCHEDULED = "grad_accum=2 batch=2 optimizer=sgd optimizer.schedule=linear optimizer.schedule_steps=20"
TWO_GROUPS = "strategy=deepspeed_ulysses sp_degree=2 cluster.world_size=4"
STACKS = [trainer for trainer, facts in TRAINER_FACTS.items() if facts.is_stack]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "strategy", "engine", "more"),
    [
        *((*triple, "") for triple in TRIPLES),
        *((trainer, "deepspeed_ulysses", "zero3", SCHEDULED) for trainer in STACKS),
    ],
)
def test_stack_trains_as_the_native_loop_in_every_table_row(
    launcher, tmp_path, trainer, strategy, engine, more
):
    if installed_version(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    spread = "dp_shard=2" if strategy == "local" else "sp_degree=2"
    words = (f"strategy={strategy}", f"engine={engine}", "cluster.world_size=2", spread, *more.split())
    native = losses_of(launcher, tmp_path, *words)
    stack = losses_of(launcher, tmp_path, *words, f"trainer={trainer}")
    assert stack.loss == pytest.approx(native.loss, rel=2e-6)
    assert stack.grad_norm == pytest.approx(native.grad_norm, rel=1e-5)
    if trainer != "accelerate":  # its documentation logs the loss of the local rank only
        assert stack.logged_max_difference == pytest.approx(0, abs=1e-5)


def test_stacks_page_has_the_rows_of_the_table():
    rows = re.findall(r"^\| (\w+) \| ((?:\w+, )*(?:ddp|fsdp2|zero3)) \|$", PAGE.read_text(), re.MULTILINE)
    pairs = {(strategy, engine) for strategy, engines in rows for engine in engines.split(", ")}
    for trainer in STACKS:
        assert pairs == {triple[1:] for triple in TRIPLES if triple[0] == trainer}


@pytest.mark.parametrize("words", ["batch=1", "batch=3 grad_accum=2", "dp_shard=2 cluster.world_size=4"])
def test_stack_samples_of_shared_batches_equal_native_batches(words):
    cell = make_cell("seq_len=64", "data=synthetic", *ULYSSES, *words.split())
    data = open_data(cell, torch.device("cpu"))
    samples = StackSamples(data, 0, 64, shares_batches=True)
    processes = cell.cluster.world_size
    for process in range(processes):
        group = process // cell.sp_degree
        for round_ in range(2):  # the loader gathers a batch from every rank of the group
            for place in range(cell.sp_degree):
                batch = round_ * processes + group * cell.sp_degree + place
                micro_step = round_ * cell.sp_degree + place
                assert batch_place(cell, batch, cell.sp_degree) == (micro_step, group)
                step, within = divmod(micro_step, cell.grad_accum)
                expected = data.micro_batch(step, within, group, 64)
                rows = [samples[batch * cell.batch + row] for row in range(cell.batch)]
                assert torch.equal(torch.stack([row["input_ids"] for row in rows]), expected.input_ids)
                assert torch.equal(torch.stack([row[NEXT_LABELS] for row in rows]), expected.labels)
                assert all(torch.equal(row["labels"][1:], row["input_ids"][1:]) for row in rows)


def test_mask_of_documents_needs_another_kernel_on_a_gpu():
    words = ("trainer=transformers", "data.packing=documents", "model=qwen3_nano")
    assert refusal(make_cell(*words, "strategy=local", machine=FOUR_H100)) is None  # on cuDNN
    make = partial(make_cell, *words, "kernel=torch_flash", machine=FOUR_H100)
    reason = "kernel=torch_flash takes no mask on a GPU; choose kernel=cudnn"
    assert reason in refusal(make("strategy=local"))
    # DeepSpeed drops the mask where ranks share a sequence.
    assert refusal(make("strategy=deepspeed_ulysses", "sp_degree=2", "cluster.world_size=2")) is None
    assert reason in refusal(make("strategy=deepspeed_ulysses", "sp_degree=1", "cluster.world_size=1"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("strategy=ring engine=zero3", "no strategy=ring; take trainer=native"),
        ("strategy=deepspeed_ulysses engine=fsdp2", "under engine=zero3, not fsdp2"),
        ("strategy=deepspeed_ulysses kernel=math", "no kernel=math; choose kernel=torch_flash"),
        ("strategy=deepspeed_ulysses loss=chunked", "leave loss at auto, or choose loss=untiled"),
        (
            "strategy=local engine=fsdp2 offload.activations=true checkpointing=true",
            "which needs a GPU; take",
        ),
        ("strategy=local engine=ddp data.packing=documents dp_shard=2", "unequal numbers of labels; take"),
        ("strategy=local engine=ddp data.packing=documents grad_accum=2", "unequal numbers of labels; take"),
        ("strategy=torch_cp engine=fsdp2 data.packing=documents", "not for torch_cp"),
        ("strategy=local engine=fsdp2 dtype=fp64", "no dtype=fp64; choose dtype=bf16 or fp32"),
        ("strategy=local engine=fsdp2 dp_replicate=2", "take dp_replicate=1 dp_shard=2, or trainer=native"),
        (f"{TWO_GROUPS} dp_shard=2", "one group only; take dp_replicate=1 dp_shard=1, trainer=native, or"),
        (f"{TWO_GROUPS} dp_replicate=2", "gathers losses, which gloo can do in one group only"),
    ],
)
def test_stack_refuses_unsupported_settings_with_a_way_out(words, reason):
    base = ("seq_len=256", "cluster.world_size=2", "trainer=accelerate")
    assert reason in refusal(make_cell(*base, *words.split()))
