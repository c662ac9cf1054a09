"""Loops as people write them, one rank each: right ones are not called wrong, their numbers are theirs."""

import errno
import gc
import json
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import bench
from bench.config import ConfigError
from bench.observation.observed_model import observed_model
from bench.observation.outcome import ObserveRequest
from bench.observation.script import script_facts
from bench.store import Store
from tests.scripts.own_loop import NUMBERS, VOCABULARY

LENGTH = 64
ONE_STEP = ObserveRequest(strategy="own", folder=Path(), steps=1, warmup_steps=0, report=False)


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    """A traced step looks for another profiler among all objects, of which a session of tests has many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_model(**more):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**NUMBERS, attn_implementation="sdpa", **more))


def tokens(batch=1, length=LENGTH):
    return torch.randint(VOCABULARY, (batch, length))


def train(model, folder, step, *, report=False, **choices):
    """The record of a loop whose step is `step(number)`; the model is updated after it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for number in range(ONE_STEP.steps_needed):
        with bench.observe(model, folder=folder, steps=1, warmup_steps=0, report=report, **choices):
            step(number)
            optimizer.step()
            optimizer.zero_grad()
    (line,) = (folder / "records.jsonl").read_text().splitlines()
    return json.loads(line)


def backward(model, **inputs):
    model(**inputs).logits.float().square().mean().backward()


def test_a_report_that_cannot_be_made_ends_no_training_and_spoils_no_record(tmp_path, monkeypatch, capsys):
    def no_room(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "run", no_room)
    model = small_model()
    record = train(model, tmp_path, lambda _: backward(model, input_ids=tokens()), report=True)
    assert record["status"] == "ok"
    assert "out_of_memory" not in "".join(capsys.readouterr())


def test_under_autocast_attention_is_held_to_the_dtype_that_it_computes_in(tmp_path):
    model = small_model()

    def step(_):
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, input_ids=tokens())

    record = train(model, tmp_path, step)
    assert (record["status"], record["config"]["dtype"]) == ("ok", "bf16")
    assert record["parity"]["limits"]["out"] > 1e-3  # 1e-5 in float32


def test_frozen_keys_as_adapters_have_them_do_not_end_a_training(tmp_path):
    model = small_model()
    for layer in model.model.layers:
        layer.self_attn.k_proj.requires_grad_(requires_grad=False)
        layer.self_attn.k_norm.requires_grad_(requires_grad=False)
    model.model.embed_tokens.requires_grad_(requires_grad=False)
    record = train(model, tmp_path, lambda _: backward(model, input_ids=tokens()))
    assert record["status"] == "ok"


def test_calls_without_gradients_are_no_micro_steps(tmp_path):
    model = small_model()

    def step(_):
        with torch.no_grad():
            model(input_ids=tokens())
        backward(model, input_ids=tokens())

    record = train(model, tmp_path, step)
    assert record["config"]["grad_accum"] == 1
    assert record["timing"]["tokens_per_step"] == LENGTH


def next_token_loss(model, ids, *, shift=1, told=None):
    """A mean over next tokens, and what is told of it; `shift` tokens ahead."""
    logits = model(input_ids=ids).logits
    loss = cross_entropy(logits[:, : LENGTH - shift].flatten(0, 1), ids[:, shift:].flatten(), reduction="sum")
    return loss / (told or ids[:, shift:].numel())


OBJECTIVES = {
    "right": (lambda loss: (loss, loss), None),
    "a sum": (lambda loss: (loss * 63, loss * 63), "gradients are 63 times those of the mean loss"),
    "another loss than it trains": (lambda loss: (loss, loss + 1), "say that one"),
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_a_loss_that_is_told_is_held_against_its_tokens(tmp_path, case):
    model = DistributedDataParallel(small_model())
    change, reason = OBJECTIVES[case]

    def step(_):
        trained, told = change(next_token_loss(model, tokens()))
        bench.observe(model, folder=tmp_path, steps=1, warmup_steps=0, report=False).loss(told, LENGTH - 1)
        trained.backward()

    record = train(model, tmp_path, step)
    assert (record["status"], record["timing"] is None) == (
        ("wrong_result", True) if reason else ("ok", False)
    )
    assert reason is None or reason in record["reason"]


def test_gradients_that_several_contexts_add_up_are_compared_but_for_a_factor(tmp_path):
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(ONE_STEP.steps_needed):
        with bench.observe(model, folder=tmp_path, steps=1, warmup_steps=0, report=False) as step:
            loss = next_token_loss(model, tokens()) / 2
            step.loss(2 * loss, LENGTH - 1)
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    (record,) = bench.read_records(tmp_path / "records.jsonl")
    (objective,) = (check for check in record["checks"] if check["what"] == "objective")
    assert record["status"] == "ok", record["reason"]
    assert objective["against"].endswith("but for a factor")


def test_labels_that_are_not_the_next_tokens_are_found(tmp_path):
    model = small_model()

    def step(_):
        loss = next_token_loss(model, tokens(), shift=2)
        bench.observe(model, folder=tmp_path, steps=1, warmup_steps=0, report=False).loss(loss, LENGTH - 2)
        loss.backward()

    reason = train(model, tmp_path, step)["reason"]
    assert reason.startswith("objective: rank 0 trains position 0 on token")


def test_micro_steps_that_divide_by_their_own_counts_are_found(tmp_path):
    model = small_model()

    def step(_):
        for length in (LENGTH, LENGTH // 2):
            ids = tokens()
            logits = model(input_ids=ids).logits[:, : length - 1]
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:length].flatten()) / 2
            bench.observe(model, folder=tmp_path, steps=1, warmup_steps=0, report=False).loss(loss)
            loss.backward()

    reason = train(model, tmp_path, step)["reason"]
    assert "a token of rank 0, micro-step 1 weighs 2.032 times one of rank 0, micro-step 0" in reason


def test_micro_steps_are_counted(tmp_path):
    model = small_model()
    record = train(model, tmp_path, lambda _: [backward(model, input_ids=tokens()) for _ in range(3)])
    assert record["config"]["grad_accum"] == 3
    assert record["timing"]["tokens_per_step"] == 3 * LENGTH


def test_steps_of_different_sizes_have_no_speed(tmp_path):
    model = small_model()
    record = train(model, tmp_path, lambda n: backward(model, input_ids=tokens(length=LENGTH + 8 * n)))
    assert (record["status"], record["timing"]) == ("unsupported", None)
    assert "pad all batches to one size" in record["reason"]


def test_labels_of_one_rank_are_no_mistake(tmp_path):
    model = small_model()
    ids = tokens(batch=2)
    record = train(model, tmp_path, lambda _: model(input_ids=ids, labels=ids).loss.backward())
    assert (record["status"], record["config"]["batch"]) == ("ok", 2)


@pytest.mark.parametrize("mask", ["a sliding window", "a mask"])
def test_attention_that_is_not_plain_is_said_not_to_be_compared(tmp_path, mask):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    model = small_model(**(window if mask == "a sliding window" else {}))  # only its last layer has it
    padded = torch.ones(1, LENGTH, dtype=torch.long)
    padded[:, :8] = 0
    more = {"attention_mask": padded} if mask == "a mask" else {}
    record = train(model, tmp_path, lambda _: backward(model, input_ids=tokens(), **more))
    assert record["status"] == "ok"
    assert mask in record["parity"]["reason"]


def test_layers_of_other_kinds_are_told_by_the_configuration_and_by_what_they_hold():
    assert observed_model(small_model()).other_layers(LENGTH) == []
    conv = AutoConfig.for_model("lfm2", **NUMBERS, layer_types=["conv", "full_attention"], block_ff_dim=32)
    found = observed_model(AutoModelForCausalLM.from_config(conv)).other_layers(LENGTH)
    assert found == ["1 of 2 layers are conv", "Lfm2ShortConv holds a convolution over tokens"]
    sinks = AutoConfig.for_model(
        "gpt_oss", **NUMBERS, layer_types=["full_attention"] * 2, num_local_experts=2
    )
    found = observed_model(AutoModelForCausalLM.from_config(sinks)).other_layers(LENGTH)
    assert found == ["GptOssAttention holds attention sinks (in 2 places)"]


class DeepSpeed(torch.nn.Module):
    """A stand-in for an engine of DeepSpeed: its stage, and how many ranks share a sequence."""

    def __init__(self, stage, sharers):
        super().__init__()
        self.module, self.stage, self.sequence_parallel_size = small_model(), stage, sharers

    def zero_optimization_stage(self):
        return self.stage


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("sharers", [1, 2])
def test_deepspeeds_divisor_is_not_known_with_its_sequence_groups_below_stage_3(stage, sharers):
    model = observed_model(DeepSpeed(stage, sharers))
    is_known = sharers == 1 or stage == 3
    assert model.averages_gradients() is is_known
    assert (model.unknown_divisor() is None) is is_known


def test_a_step_that_trains_nothing_that_is_seen_says_so_at_once(tmp_path, capsys):
    model = small_model()
    with bench.observe(model, folder=tmp_path):
        pass
    said = capsys.readouterr().err
    assert "the training goes on: the step did not call the model with input_ids" in said
    with bench.observe(model, folder=tmp_path):
        backward(model, input_ids=tokens())


def compile_its_forward(model):
    model.forward = torch.compile(model.forward)


COMPILED = {
    "one layer of it": lambda model: model.model.layers[0].compile(),
    "what wraps it": torch.compile,
    "its forward": compile_its_forward,
}


@pytest.mark.parametrize("part", COMPILED)
def test_a_compiled_model_is_said_not_to_be_observed_before_it_is_looked_at(tmp_path, capsys, part):
    model = small_model()
    kept = COMPILED[part](model)
    with bench.observe(model, folder=tmp_path):
        assert not model._forward_pre_hooks
    assert "the training goes on: the model is compiled" in capsys.readouterr().err
    del kept


def test_a_step_whose_backward_stands_outside_has_no_time(tmp_path, capsys):
    model = small_model()
    with bench.observe(model, folder=tmp_path):
        loss = model(input_ids=tokens()).logits.float().square().mean()
    loss.backward()
    assert "put backward into the context, too" in capsys.readouterr().err


def test_one_model_is_observed_at_a_time(tmp_path, capsys):
    student, teacher = small_model(), small_model()

    def step(_):
        with bench.observe(teacher, folder=tmp_path):
            backward(student, input_ids=tokens())

    assert train(student, tmp_path, step)["status"] == "ok"
    assert capsys.readouterr().err.count("observe one model at a time") == 1


def test_the_loops_own_error_goes_on_whatever_fails_beside_it(tmp_path, monkeypatch, capsys):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "append", no_room)
    model = small_model()
    with bench.observe(model, folder=tmp_path):
        backward(model, input_ids=tokens())
    with pytest.raises(ZeroDivisionError, match="the loop's own"), bench.observe(model, folder=tmp_path):
        raise ZeroDivisionError("the loop's own")
    assert "no record: OSError: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_model_that_is_observed_already_is_not_with_other_choices(tmp_path):
    model = small_model()
    bench.observe(model, folder=tmp_path)
    with pytest.raises(ConfigError, match="observed already, with other choices"):
        bench.observe(model, folder=tmp_path, steps=3)


def test_experts_are_refused_before_they_are_trained(tmp_path):
    model = MixtralForCausalLM(MixtralConfig(**NUMBERS, num_local_experts=2))
    with pytest.raises(
        ConfigError, match=r"bench.observe: MixtralForCausalLM has experts, .*; choose a dense model"
    ):
        bench.observe(model, folder=tmp_path)


def test_records_that_cannot_be_added_to_are_refused_before_the_training(tmp_path):
    (tmp_path / "records.jsonl").write_text("no record\n")
    with pytest.raises(ValueError, match=r"records.jsonl:1: not a record"):
        bench.observe(small_model(), folder=tmp_path)


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"bench.observe: folder=.*file/in: cannot be written to \(Not a dir"
    ):
        bench.observe(small_model(), folder=tmp_path / "file" / "in")


def test_numbers_that_are_none_are_called_so(tmp_path):
    model = small_model()
    torch.nn.init.constant_(model.model.layers[0].self_attn.q_norm.weight, torch.nan)
    reason = train(model, tmp_path, lambda _: backward(model, input_ids=tokens()))["reason"]
    assert reason == f"attention parity: out of a real step at {LENGTH} tokens is not finite"


STATED = {
    "a step under the clock": ((1, float("nan"), LENGTH - 1), "loss of step 1 on rank 0 is nan"),
    "the last step, in 16 bit": (
        (7, torch.tensor(-torch.inf).bfloat16(), 63),
        "loss of step 7 on rank 0 is -inf",
    ),
    "a count": ((3, 1.0, torch.tensor(torch.inf)), "number of valid tokens of step 3 on rank 0 is inf"),
}


@pytest.mark.parametrize("case", STATED)
def test_a_number_that_the_loop_states_and_that_is_not_finite_is_named(tmp_path, case):
    (wrong_step, loss, count), said = STATED[case]
    assert wrong_step < ONE_STEP.steps_needed
    model = small_model()

    def step(number):
        trained = next_token_loss(model, tokens())
        told = (loss, count) if number == wrong_step else (trained, LENGTH - 1)
        bench.observe(model, folder=tmp_path, steps=1, warmup_steps=0, report=False).loss(*told)
        trained.backward()

    record = train(model, tmp_path, step)
    assert (record["status"], record["reason"]) == ("wrong_result", f"the loop says that the {said}")


def test_the_record_says_whose_script_it_was_and_no_folder_of_this_machine(tmp_path):
    scripts = tmp_path / "theirs" / "scripts"
    scripts.mkdir(parents=True)
    script = scripts / "train.py"
    script.touch()
    git = ["git", "-C", str(tmp_path / "theirs"), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    argv = [str(script), f"--data={tmp_path}/secret/text.bin", "--lr=1e-3", str(tmp_path / "elsewhere.py")]
    found = script_facts(script, argv)
    assert (len(found["script_commit"]), found["script_dirty"]) == (40, False)
    assert found["argv"] == ["scripts/train.py", "--data=.../text.bin", "--lr=1e-3", ".../elsewhere.py"]
    script.write_text("changed")
    assert script_facts(script, argv)["script_dirty"]
    outside = script_facts(tmp_path / "outside.py", argv)
    assert (outside["script_commit"], outside["script_dirty"]) == (None, None)


def test_after_it_is_over_nothing_holds_the_model(tmp_path):
    model = small_model()
    train(model, tmp_path, lambda _, trained=model: backward(trained, input_ids=tokens()))
    gone = weakref.ref(model)
    gc.disable()  # a script that builds its next model does not wait for the collector
    del model
    gc.enable()
    assert gone() is None
