"""Loops of many kinds on one rank: right loops pass, wrong ones are named, and refusals say why."""

import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

import bench
from bench.config import ConfigError
from bench.extras.observe.cell import ObserveRequest
from bench.extras.observe.observed_model import ObservedModel, observed_model
from tests.support.records import read_lines
from tests.support.scripts.other_loops import small_model, transformers_trainer
from tests.support.scripts.own_loop import NUMBERS, VOCABULARY

LENGTH = 64
ONE_STEP = {"steps": 1, "warmup_steps": 0, "report": False}
STEPS_NEEDED = ObserveRequest(strategy="own", folder=Path(), **ONE_STEP).steps_needed


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    """Freeze existing objects: a traced step searches all objects for another profiler, which is slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tokens(batch=1, length=LENGTH):
    return torch.randint(VOCABULARY, (batch, length))


def train(model, folder, step, *, update_every=1):
    """Return the record of a loop with steps `step(model, number, observation)` and then an update."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for number in range(STEPS_NEEDED):
        with bench.observe(model, folder=folder, **ONE_STEP) as observation:
            step(model, number, observation)
            if (number + 1) % update_every == 0:
                optimizer.step()
                optimizer.zero_grad()
    (record,) = read_lines(folder / "records.jsonl")
    return record


def plain(model, *_, **inputs):
    model(**{"input_ids": tokens()} | inputs).logits.float().square().mean().backward()


def frozen_keys():
    """Return a model with frozen keys, as with adapters; the first layer's inputs need no gradient."""
    model = small_model()
    for layer in model.model.layers:
        layer.self_attn.k_proj.requires_grad_(requires_grad=False)
        layer.self_attn.k_norm.requires_grad_(requires_grad=False)
    model.model.embed_tokens.requires_grad_(requires_grad=False)
    return model


def with_a_reference(model, *_):
    with torch.no_grad():
        model(input_ids=tokens())
    plain(model)


def with_plain_labels(model, *_):
    ids = tokens(batch=2)
    model(input_ids=ids, labels=ids).loss.backward()


RIGHT = {
    "autocast": (small_model, torch.autocast("cpu", torch.bfloat16)(plain), {"dtype": "bf16"}),
    "frozen keys": (frozen_keys, plain, {"grad_accum": 1}),
    "calls without gradients, which are no micro-steps": (small_model, with_a_reference, {"grad_accum": 1}),
    "micro-steps": (small_model, lambda model, *_: [plain(model) for _ in range(3)], {"grad_accum": 3}),
    "plain labels, no mistake on one rank": (small_model, with_plain_labels, {"batch": 2}),
}


@pytest.mark.parametrize("loop", RIGHT)
def test_record_of_a_right_loop_has_the_settings_of_the_loop(tmp_path, loop):
    make_model, step, settings = RIGHT[loop]
    record = train(make_model(), tmp_path, step)
    config = record["config"]
    assert record["status"] == "ok"
    assert settings.items() <= config.items()
    assert record["timing"]["tokens_per_step"] == config["batch"] * config["grad_accum"] * LENGTH
    assert (record["full_length"]["limits"]["out"] > 1e-3) is (config["dtype"] == "bf16")  # 1e-5 in float32


def stating(change, shift=1):
    """Return a step on tokens `shift` ahead; `change(mean, number)` is its loss and what it states."""

    def step(model, number, observation):
        ids = tokens()
        logits = model(input_ids=ids).logits[:, : LENGTH - shift]
        trained, *stated = change(cross_entropy(logits.flatten(0, 1), ids[:, shift:].flatten()), number)
        observation.loss(*stated)
        trained.backward()

    return step


def micro_steps(lengths, stated):
    """Return a step with a call for each length, which divides each mean by the number of calls."""

    def step(model, _, observation):
        for length, is_stated in zip(lengths, stated, strict=True):
            ids = tokens()
            logits = model(input_ids=ids).logits[:, : length - 1]
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:length].flatten()) / len(lengths)
            if is_stated:
                observation.loss(loss, length - 1)
            loss.backward()

    return step


STATED = {
    "right, and stated in the last micro-step only": (micro_steps((LENGTH, LENGTH), (False, True)), None),
    "right": (stating(lambda loss, _: (loss, loss, 63)), None),
    "a sum": (stating(lambda loss, _: (loss * 63, loss * 63, 63)), "63 times those of the mean loss"),
    "not the next tokens": (
        stating(lambda loss, _: (loss, loss, 62), shift=2), "objective: rank 0 trains position 0 on token",
    ),
    "micro-steps that divide by their own counts": (
        micro_steps((LENGTH, LENGTH // 2), (True, True)),
        "a token of rank 0, micro-step 1 weighs 2.032 times one of rank 0, micro-step 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATED)
def test_stated_loss_is_compared_with_the_trained_tokens(tmp_path, case):
    step, reason = STATED[case]
    record = train(DistributedDataParallel(small_model()), tmp_path, step)
    if reason is None:
        assert (record["status"], record["reason"]) == ("ok", None)
    else:
        assert (record["status"], record["timing"]) == ("wrong_result", None)
        assert reason in record["reason"]


def squared_logits(outputs, labels, num_items_in_batch):
    return outputs.logits.square().mean()


@pytest.mark.parametrize(
    ("choices", "reason"),
    [({}, None), ({"compute_loss_func": squared_logits}, "label smoothing or compute_loss_func")],
)
def test_objective_of_a_trainer_is_that_of_its_model_loss(tmp_path, choices, reason):
    scripted = torch.jit.script(torch.nn.Linear(1, 1))  # its table of modules is no dict
    transformers_trainer(partial(bench.observe, folder=tmp_path, **ONE_STEP), **choices)
    del scripted
    (record,) = read_lines(tmp_path / "records.jsonl")
    (objective,) = (check for check in record["checks"] if check["what"] == "objective")
    assert record["status"] == "ok"
    assert reason in objective["reason"] if reason else objective["reason"] is None


def test_gradients_summed_over_contexts_match_up_to_a_factor(tmp_path):
    halved = stating(lambda loss, _: (loss / 2, loss, 63))
    record = train(DistributedDataParallel(small_model()), tmp_path, halved, update_every=2)
    (objective,) = (check for check in record["checks"] if check["what"] == "objective")
    assert record["status"] == "ok", record["reason"]
    assert objective["against"].endswith("up to a factor")


def test_steps_of_different_sizes_are_unsupported(tmp_path):
    def step(model, number, _):
        plain(model, input_ids=tokens(length=LENGTH + 8 * number))

    record = train(small_model(), tmp_path, step)
    assert (record["status"], record["timing"]) == ("unsupported", None)
    assert "pad all batches to one size" in record["reason"]


@pytest.mark.parametrize("feature", ["it has a sliding window", "it is given a mask"])
def test_attention_reason_names_what_is_not_plain(tmp_path, feature):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    model = small_model(**(window if "window" in feature else {}))  # only its last layer has it
    padded = torch.ones(1, LENGTH, dtype=torch.long)
    padded[:, :8] = 0
    more = {"attention_mask": padded} if "mask" in feature else {}
    record = train(model, tmp_path, partial(plain, **more))
    assert record["status"] == "ok"
    assert feature in record["full_length"]["reason"]


@pytest.mark.parametrize(("engine", "factor"), [("zero0", 2), ("zero1", 2), ("zero2", 2), ("zero3", 1)])
def test_deepspeed_adds_up_over_sequence_ranks_below_stage_3(monkeypatch, engine, factor):
    """Seen in the update of one SGD step under stages 0, 1 and 2 of DeepSpeed 0.19.8."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    wrapper = SimpleNamespace(sequence_parallel_size=2)
    assert ObservedModel([wrapper], [], None, engine, None).gradient_factor() == factor / 4


@pytest.mark.parametrize("divide_factor", [None, 1.0, 4.0])
def test_fsdp2_divides_by_its_own_factor(divide_factor):
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if divide_factor is not None:
        model.set_gradient_divide_factor(divide_factor)
    assert observed_model(model).gradient_factor() == 1 / (divide_factor or 1)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda _: None, "the training continues; reason: the step did not call the model with input_ids"),
        (lambda model: model(input_ids=tokens()), "put backward into the context, too"),
    ],
)
def test_step_without_forward_or_backward_ends_the_observation(tmp_path, capsys, step, reason):
    model = small_model()
    with bench.observe(model, folder=tmp_path):
        step(model)
    assert reason in capsys.readouterr().err
    with bench.observe(model, folder=tmp_path):
        plain(model)


def compile_its_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


COMPILED = {
    "one layer of it": lambda model: model.model.layers[0].compile(backend="eager"),
    "itself": lambda model: model.compile(backend="eager"),
    "what wraps it": lambda model: torch.compile(model, backend="eager"),
    "its forward": compile_its_forward,
}


@pytest.mark.parametrize("part", COMPILED)
def test_compiled_model_is_measured_without_hooks_and_checks(tmp_path, part):
    model = small_model()
    compiled = COMPILED[part](model)
    called = compiled if isinstance(compiled, torch.nn.Module) else model
    programs = []

    def step(_, number, observation):
        ids = tokens()
        observation.loss(loss := called(input_ids=ids, labels=ids).loss, LENGTH - 1)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        loss.backward()
        programs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    record = train(model, tmp_path, step)
    assert (record["status"], record["config"]["seq_len"]) == ("ok", LENGTH)
    assert len({*programs[1:]}) == 1
    reasons = {check["what"]: check["reason"] for check in record["checks"]}
    for check in ("attention of one layer", "objective"):
        assert reasons[check].startswith("the model is compiled")


def test_second_model_is_not_observed_at_the_same_time(tmp_path, capsys):
    student, teacher = small_model(), small_model()

    def step(*_):
        with bench.observe(teacher, folder=tmp_path):
            plain(student)

    assert train(student, tmp_path, step)["status"] == "ok"
    assert capsys.readouterr().err.count("observe one model at a time") == 1


def test_observe_refuses_other_arguments_for_the_same_model(tmp_path):
    model = small_model()
    assert bench.observe(model, folder=tmp_path) is bench.observe(model, folder=tmp_path, steps="20")
    with pytest.raises(ConfigError, match="already observed with other arguments"):
        bench.observe(model, folder=tmp_path, steps=3)


def test_model_is_observed_again_in_another_folder(tmp_path):
    model = small_model()
    assert [train(model, tmp_path / folder, plain)["repeat"] for folder in ("short", "long")] == [0, 0]


def mixture():
    return MixtralForCausalLM(MixtralConfig(**NUMBERS, num_local_experts=2))


@pytest.mark.parametrize(
    ("make_model", "folder", "choices", "refusal"),
    [
        (mixture, ".", {}, "bench.observe: MixtralForCausalLM has experts; .*; choose a dense model"),
        (partial(torch.nn.Linear, 1, 1), ".", {}, "Linear holds no transformers model"),
        (small_model, "broken", {}, "records.jsonl:1: not a record"),
        (
            small_model, "file/in", {},
            r"bench.observe: folder=.*file/in: cannot be written to \(Not a directory\); name another folder",
        ),
        (small_model, ".", {"steps": 0}, "steps=0"),
        (small_model, ".", {"warmup_steps": -1}, "warmup_steps=-1"),
        (
            small_model, ".", {"strategy": "torch_cp"},
            r"strategy=torch_cp: .* its options \(rotation\).*; pass another name",
        ),
    ],
)  # fmt: skip
def test_observe_refuses_before_the_training(tmp_path, make_model, folder, choices, refusal):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "records.jsonl").write_text("no record\n")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=refusal):
        bench.observe(make_model(), folder=tmp_path / folder, **choices)


def test_error_in_forward_has_that_phase(tmp_path):
    model = small_model()
    model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, tmp_path, plain)
    (record,) = read_lines(tmp_path / "records.jsonl")
    assert "forward: ZeroDivisionError" in record["reason"]


def test_attention_with_nan_is_called_not_finite(tmp_path):
    model = small_model()
    torch.nn.init.constant_(model.model.layers[0].self_attn.q_norm.weight, torch.nan)
    reason = train(model, tmp_path, plain)["reason"]
    assert reason == f"attention at {LENGTH} tokens: out is not finite"


def test_observation_releases_the_model_when_it_is_over(tmp_path):
    model = small_model()
    train(model, tmp_path, plain)
    reference = weakref.ref(model)
    gc.disable()  # reference counts must suffice: a script may build its next model before the collector runs
    del model
    gc.enable()
    assert reference() is None
